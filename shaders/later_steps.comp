#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Step { int step_values[]; };
layout(binding = 1) buffer Y { int y[]; };
layout(push_constant) uniform Push { uint step_at; uint step_row; uint y_at; uint n_steps; uint n_seqs; } push;

void main() {
    uint n = push.n_steps * 2u * push.n_seqs;
    for (uint i = gl_LocalInvocationIndex; i < n; i += LOCAL_SIZE) {
        uint s = i % push.n_seqs, row = i / push.n_seqs % 2u, k = i / push.n_seqs / 2u;
        int value = step_values[push.step_at + row * push.step_row + s];
        y[push.y_at + i] = row == 0u ? value + int(k) : value;
    }
}
