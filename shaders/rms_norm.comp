#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// One workgroup per row.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer W { float w[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint w_at; uint y_at; uint y_row; uint n; uint n_rows; float eps;
} push;

void main() {
    uint row = WORKGROUP_INDEX;
    if (row >= push.n_rows) { return; }
    uint x_row = push.x_at + row * push.x_row;
    float sum = 0.0;
    for (uint i = gl_LocalInvocationIndex; i < push.n; i += LOCAL_SIZE) {
        float v = x[x_row + i];
        sum = fma(v, v, sum);
    }
    float scale = inversesqrt(workgroup_add(sum) / float(push.n) + push.eps);
    for (uint i = gl_LocalInvocationIndex; i < push.n; i += LOCAL_SIZE) {
        y[push.y_at + row * push.y_row + i] = x[x_row + i] * scale * w[push.w_at + i];
    }
}
