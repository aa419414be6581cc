#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Copies the raw conv columns of a long batch's last tokens to their places in the ring. One workgroup per column.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Projection { float p[]; };
layout(binding = 1) readonly buffer Step { int step_values[]; };
layout(binding = 2) buffer ConvRing { float conv_ring[]; };
layout(push_constant) uniform Push {
    uint qkv_at; uint p_row; uint step_at; uint step_row; uint conv_ring_at; uint n_columns; uint conv_dim;
    uint n_tokens; uint n_kept; uint n_seqs;
} push;

void main() {
    uint s = WORKGROUP_INDEX / push.n_kept, t = push.n_tokens - push.n_kept + WORKGROUP_INDEX % push.n_kept;
    if (s >= push.n_seqs) { return; }
    uint n_past = uint(step_values[push.step_at + s]), slot = uint(step_values[push.step_at + push.step_row + s]);
    uint from = push.qkv_at + (s * push.n_tokens + t) * push.p_row;
    uint to = push.conv_ring_at + (slot * push.n_columns + (n_past + t) % push.n_columns) * push.conv_dim;
    for (uint i = gl_LocalInvocationIndex; i < push.conv_dim; i += LOCAL_SIZE) { conv_ring[to + i] = p[from + i]; }
}
