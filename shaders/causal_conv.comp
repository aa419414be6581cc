#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Depthwise causal conv + SiLU. One invocation takes one channel of one sequence through all its tokens: it has read
// the older columns before it writes the first new one, and nobody else touches its channel of the ring.
layout(constant_id = 0) const uint TAPS = 4u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer W { float w[]; };
layout(binding = 2) readonly buffer Step { int step_values[]; };
layout(binding = 3) buffer Ring { float ring[]; };
layout(binding = 4) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint w_at; uint ring_at; uint n_columns; uint step_at; uint step_row; uint y_at;
    uint conv_dim; uint n_tokens; uint n_seqs; uint n_spans;
} push;

void main() {
    uint s = WORKGROUP_INDEX / push.n_spans;
    uint channel = WORKGROUP_INDEX % push.n_spans * LOCAL_SIZE + gl_LocalInvocationIndex;
    if (s >= push.n_seqs || channel >= push.conv_dim) { return; }
    uint n_past = uint(step_values[push.step_at + s]), slot = uint(step_values[push.step_at + push.step_row + s]);
    uint column_0 = push.ring_at + slot * push.n_columns * push.conv_dim + channel;

    float weight[TAPS], window[TAPS];  // oldest first
    [[unroll]] for (uint j = 0u; j < TAPS; ++j) {
        uint back = TAPS - 1u - j;
        weight[j] = w[push.w_at + channel * TAPS + j];
        window[j] = 0.0;
        if (back > 0u && back <= n_past) { window[j] = ring[column_0 + (n_past - back) % push.n_columns * push.conv_dim]; }
    }
    for (uint t = 0u; t < push.n_tokens; ++t) {
        uint row = s * push.n_tokens + t;
        float newest = x[push.x_at + row * push.x_row + channel];
        window[TAPS - 1u] = newest;
        float sum = 0.0;
        [[unroll]] for (uint j = 0u; j < TAPS; ++j) { sum = fma(window[j], weight[j], sum); }
        [[unroll]] for (uint j = 0u; j + 1u < TAPS; ++j) { window[j] = window[j + 1u]; }
        y[push.y_at + row * push.conv_dim + channel] = sum / (1.0 + exp(-sum));
        if (t + push.n_columns >= push.n_tokens) {
            ring[column_0 + (n_past + t) % push.n_columns * push.conv_dim] = newest;
        }
    }
}
