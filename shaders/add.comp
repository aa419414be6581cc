#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// One invocation per element.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer A { float a[]; };
layout(binding = 1) readonly buffer B { float b[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(push_constant) uniform Push { uint a_at; uint a_row; uint b_at; uint b_row; uint y_at; uint n; uint total; } push;

void main() {
    uint i = WORKGROUP_INDEX * LOCAL_SIZE + gl_LocalInvocationIndex;
    if (i >= push.total) { return; }
    uint row = i / push.n, column = i % push.n;
    y[push.y_at + i] = a[push.a_at + row * push.a_row + column] + b[push.b_at + row * push.b_row + column];
}
