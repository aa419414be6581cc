#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// y = x + sigmoid(shared gate) * shared expert + weighted sum of a row's experts, for 1..16 rows. SPLIT teams share N_R
// weight rows and take the row's experts in turn; lanes are summed by team_add, teams in their order. Where experts lie
// in several parts, one dispatch after the other adds its own to y.
layout(constant_id = 0) const uint N_R = 4u;
layout(constant_id = 1) const uint SPLIT = 1u;
layout(constant_id = 2) const uint N_USED = 1u;
layout(constant_id = 3) const uint IS_FIRST = 1u;  // y holds nothing yet

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer Inner { vec4 inner_quads[]; };
layout(binding = 2) readonly buffer Experts { uint experts[]; };
layout(binding = 3) readonly buffer RouteWeights { float route_weights[]; };
layout(binding = 4) buffer Y { float y[]; };
layout(binding = 5) readonly buffer X { float x[]; };
layout(binding = 6) readonly buffer SharedExpert { float shared_out[]; };
layout(binding = 7) readonly buffer SharedGate { float shared_gate[]; };
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out; uint first_expert; uint n_experts;
    uint inner_at; uint experts_at; uint route_weights_at; uint y_at; uint x_at; uint x_row;
    uint shared_at; uint shared_row; uint gate_at; uint gate_row; uint n_rows; uint n_blocks;
} push;

#include "weights.glsl"
#include "multiply.glsl"

const uint ROWS = TEAMS / SPLIT * N_R;  // weight rows of a workgroup

shared float team_sums[TEAMS * N_R];

// What the experts' sum is added to.
float before(uint t, uint column) {
    if (IS_FIRST == 0u) { return y[push.y_at + t * push.n_out + column]; }
    float gate = 1.0 / (1.0 + exp(-shared_gate[push.gate_at + t * push.gate_row]));
    return fma(gate, shared_out[push.shared_at + t * push.shared_row + column], x[push.x_at + t * push.x_row + column]);
}

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    uint t = WORKGROUP_INDEX / push.n_blocks, base = WORKGROUP_INDEX % push.n_blocks * ROWS;
    if (t >= push.n_rows) { return; }
    uint first = base + TEAM % (TEAMS / SPLIT) * N_R;
    uint pieces = push.n_in / PIECE;

    float sums[N_R];
    [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r] = 0.0; }
    for (uint slot = TEAM / (TEAMS / SPLIT); slot < N_USED; slot += SPLIT) {
        uint pair = t * N_USED + slot;
        uint expert = experts[push.experts_at + pair] - push.first_expert;
        if (expert >= push.n_experts) { continue; }
        float of_slot[N_R];
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { of_slot[r] = 0.0; }
        for (uint p = LANE; p < pieces; p += LANES) {
            Chunk w[N_R][HALVES];
            [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                load_piece(planes, push.n_in, expert * push.n_out + min(first + r, push.n_out - 1u), p, w[r]);
            }
            vec4 v[QUADS];
            [[unroll]] for (uint i = 0u; i < QUADS; ++i) {
                v[i] = inner_quads[(push.inner_at + pair * push.n_in) / 4u + p * QUADS + i];
            }
            multiply(w, v, of_slot);
        }
        float weight = route_weights[push.route_weights_at + pair];
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r] = fma(weight, of_slot[r], sums[r]); }
    }
    [[unroll]] for (uint r = 0u; r < N_R; ++r) {
        float value = team_add(sums[r]);
        if (LANE == 0u) { team_sums[TEAM * N_R + r] = value; }
    }
    barrier();
    for (uint i = gl_LocalInvocationIndex; i < ROWS; i += LOCAL_SIZE) {
        uint column = base + i;
        if (column >= push.n_out) { break; }
        float sum = 0.0;
        [[unroll]] for (uint s = 0u; s < SPLIT; ++s) {
            sum += team_sums[(s * (TEAMS / SPLIT) + i / N_R) * N_R + i % N_R];
        }
        y[push.y_at + t * push.n_out + column] = before(t, column) + sum;
    }
}
