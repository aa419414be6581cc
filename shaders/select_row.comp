#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer Index { int row_index[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(push_constant) uniform Push { uint x_at; uint x_row; uint n_rows; uint index_at; uint y_at; uint n; } push;

void main() {
    uint row = uint(clamp(row_index[push.index_at], 0, int(push.n_rows) - 1));
    for (uint i = gl_LocalInvocationIndex; i < push.n; i += LOCAL_SIZE) {
        y[push.y_at + i] = x[push.x_at + row * push.x_row + i];
    }
}
