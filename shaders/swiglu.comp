#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// One invocation per element.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Gate { float gate[]; };
layout(binding = 1) readonly buffer Up { float up[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(push_constant) uniform Push { uint gate_at; uint gate_row; uint up_at; uint up_row; uint y_at; uint n; uint total; } push;

void main() {
    uint i = WORKGROUP_INDEX * LOCAL_SIZE + gl_LocalInvocationIndex;
    if (i >= push.total) { return; }
    uint row = i / push.n, column = i % push.n;
    float x = gate[push.gate_at + row * push.gate_row + column];
    y[push.y_at + i] = x / (1.0 + exp(-x)) * up[push.up_at + row * push.up_row + column];
}
