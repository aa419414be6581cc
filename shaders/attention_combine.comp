#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Joins the parts of the keys of one (row, head) in their order, and applies the output gate.

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Partial { float partial_values[]; };
layout(binding = 1) readonly buffer Step { int step_values[]; };
layout(binding = 2) readonly buffer Gate { float gate[]; };
layout(binding = 3) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint partial_at; uint step_at; uint gate_at; uint gate_row; uint gate_head;
    uint y_at; uint n_rows; uint n_tokens; uint n_head; uint head_dim; uint n_parts; uint part;
} push;

void main() {
    uint item = WORKGROUP_INDEX;
    uint row = item / push.n_head, head = item % push.n_head;
    if (row >= push.n_rows) { return; }
    uint position = uint(step_values[push.step_at + row / push.n_tokens]) + row % push.n_tokens;
    uint n = min(position / push.part + 1u, push.n_parts);
    uint stride = push.head_dim + 2u;
    uint first = push.partial_at + item * push.n_parts * stride;
    float best = partial_values[first];
    for (uint c = 1u; c < n; ++c) { best = max(best, partial_values[first + c * stride]); }
    for (uint d = gl_LocalInvocationIndex; d < push.head_dim; d += 128u) {
        float acc = 0.0, total = 0.0;
        for (uint c = 0u; c < n; ++c) {
            uint at = first + c * stride;
            float m = partial_values[at];
            float weight = m == best ? 1.0 : exp(m - best);  // exactly 1: one part must give DIRECT's bits
            total = fma(partial_values[at + 1u], weight, total);
            acc = fma(partial_values[at + 2u + d], weight, acc);
        }
        float g = gate[push.gate_at + row * push.gate_row + head * push.gate_head + d];
        y[push.y_at + item * push.head_dim + d] = acc / total / (1.0 + exp(-g));
    }
}
