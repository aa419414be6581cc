#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// y = x + sigmoid(shared gate) * shared expert + weighted sum of the experts' results, which lie pair by pair.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer SharedExpert { float shared_out[]; };
layout(binding = 2) readonly buffer SharedGate { float shared_gate[]; };
layout(binding = 3) readonly buffer RouteWeights { float route_weights[]; };
layout(binding = 4) readonly buffer Result { float result[]; };
layout(binding = 5) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint shared_at; uint shared_row; uint gate_at; uint gate_row;
    uint route_weights_at; uint n_used; uint result_at; uint y_at; uint n_embd; uint n;
} push;

void main() {
    uint i = WORKGROUP_INDEX * LOCAL_SIZE + gl_LocalInvocationIndex;
    if (i >= push.n) { return; }
    uint t = i / push.n_embd, column = i % push.n_embd;
    float gate = 1.0 / (1.0 + exp(-shared_gate[push.gate_at + t * push.gate_row]));
    float sum = 0.0;
    for (uint p = t * push.n_used; p < (t + 1u) * push.n_used; ++p) {
        sum = fma(route_weights[push.route_weights_at + p], result[push.result_at + p * push.n_embd + column], sum);
    }
    float before = fma(gate, shared_out[push.shared_at + t * push.shared_row + column], x[push.x_at + t * push.x_row + column]);
    y[push.y_at + i] = before + sum;
}
