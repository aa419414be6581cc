#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Divides groups of columns by the root of their mean square (given as partial sums). One workgroup per row.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer Squares { float squares[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint squares_at; uint y_at; uint n; uint n_rows; uint n_groups; uint n_parts; float eps;
} push;

void main() {
    uint row = WORKGROUP_INDEX;
    if (row >= push.n_rows) { return; }
    uint size = push.n / push.n_groups;
    for (uint i = gl_LocalInvocationIndex; i < push.n; i += LOCAL_SIZE) {
        uint at = push.squares_at + (row * push.n_groups + i / size) * push.n_parts;
        float sum = 0.0;
        for (uint j = 0u; j < push.n_parts; ++j) { sum += squares[at + j]; }
        y[push.y_at + row * push.n + i] = x[push.x_at + row * push.x_row + i] * inversesqrt(sum / float(size) + push.eps);
    }
}
