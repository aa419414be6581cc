#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Gate and up products of the experts that a row of x chose, for 1..16 rows; with SWIGLU silu(gate) * up. A workgroup finds
// the row's experts (cheaper than waiting for a dispatch that does), and computes some rows of one of them from the
// normed x. SPLIT teams share N_R weight rows: a lane takes every (8 * SPLIT)-th piece of the columns; lanes are summed
// by team_add, teams in their order. Nothing depends on the number of rows of x.
layout(constant_id = 0) const uint N_R = 2u;
layout(constant_id = 1) const uint SPLIT = 1u;
layout(constant_id = 2) const uint TILE = 0u;  // columns of x, when they are prepared once in shared memory, or 0
layout(constant_id = 3) const uint SWIGLU = 1u;  // n_out / 2 gate rows and then as many up rows in each expert
layout(constant_id = 4) const uint N_EXPERT = 1u;
layout(constant_id = 5) const uint N_USED = 1u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { vec4 x_quads[]; };
layout(binding = 2) readonly buffer Norm { vec4 norm_quads[]; };
layout(binding = 3) readonly buffer Logits { float logits[]; };
layout(binding = 4) buffer Y { float y[]; };
layout(binding = 5) buffer Experts { uint experts[]; };
layout(binding = 6) buffer RouteWeights { float route_weights[]; };
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out; uint first_expert; uint n_experts;
    uint x_at; uint x_row; uint norm_at; float eps; uint logits_at; uint logits_row;
    uint y_at; uint experts_at; uint route_weights_at; uint n_pairs; uint n_blocks; uint writes_route;
} push;

#include "weights.glsl"
#include "multiply.glsl"
#include "top_k.glsl"

const uint STRIDE = LANES * SPLIT;       // pieces that the teams of a row take at a time
const uint PITCH = TILE / PIECE + 1u;    // quads from one quad of a piece to the next: lanes read neighbours
const uint ROWS = TEAMS / SPLIT * N_R;   // weight rows of a workgroup

shared float team_sums[TEAMS * N_R];
shared vec4 x_tile[TILE == 0u ? 1u : QUADS * PITCH];

vec4 prepared(uint x_first, uint quad) {
    precise vec4 scaled = x_quads[x_first + quad] * norm_quads[push.norm_at / 4u + quad];
    return scaled;
}

// Gate and up rows alternate in the order of work, so that a team has both.
uint weight_row(uint expert, uint i) {
    uint row = min(i, push.n_out - 1u);
    if (SWIGLU != 0u) { row = row % 2u * (push.n_out / 2u) + row / 2u; }
    return expert * push.n_out + row;
}

void fetch(out Chunk w[N_R][HALVES], uint expert, uint first, uint piece) {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    [[unroll]] for (uint r = 0u; r < N_R; ++r) {
        load_piece(planes, push.n_in, weight_row(expert, first + r), min(piece, push.n_in / PIECE - 1u), w[r]);
    }
}

// The sum over the lanes of row i of this workgroup's rows.
float joined(uint i, float scale) {
    float sum = 0.0;
    [[unroll]] for (uint s = 0u; s < SPLIT; ++s) { sum += team_sums[(s * (TEAMS / SPLIT) + i / N_R) * N_R + i % N_R]; }
    precise float scaled = sum * scale;
    return scaled;
}

void main() {
    uint me = gl_LocalInvocationIndex;
    uint pair = WORKGROUP_INDEX / push.n_blocks, block = WORKGROUP_INDEX % push.n_blocks;
    if (pair >= push.n_pairs) { return; }
    uint t = pair / N_USED, slot = pair % N_USED;
    find_top(push.logits_at + t * push.logits_row);
    if (push.writes_route != 0u && block == 0u && me == 0u) {
        experts[push.experts_at + pair] = top_experts[slot];
        route_weights[push.route_weights_at + pair] = top_weight(slot);
    }
    uint expert = top_experts[slot] - push.first_expert;
    if (expert >= push.n_experts) { return; }  // in another part of the weights

    uint base = block * ROWS;
    uint first = base + TEAM % (TEAMS / SPLIT) * N_R;
    uint own = TEAM / (TEAMS / SPLIT) * LANES + LANE;
    Chunk w[N_R][HALVES];
    fetch(w, expert, first, own);

    uint x_first = (push.x_at + t * push.x_row) / 4u;
    float squares = 0.0;
    for (uint q = me; q < push.n_in / 4u; q += LOCAL_SIZE) {
        vec4 v = x_quads[x_first + q];
        squares = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, fma(v.w, v.w, squares))));
        if (TILE != 0u) { x_tile[q % QUADS * PITCH + q / QUADS] = prepared(x_first, q); }
    }
    precise float mean = workgroup_add(squares) / float(push.n_in) + push.eps;  // its barriers cover x_tile

    float sums[N_R];
    [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r] = 0.0; }
    for (uint p = own; p < push.n_in / PIECE; p += STRIDE) {
        if (p != own) { fetch(w, expert, first, p); }
        vec4 v[QUADS];
        [[unroll]] for (uint i = 0u; i < QUADS; ++i) {
            v[i] = TILE == 0u ? prepared(x_first, p * QUADS + i) : x_tile[i * PITCH + p];
        }
        multiply(w, v, sums);
    }
    [[unroll]] for (uint r = 0u; r < N_R; ++r) {
        float value = team_add(sums[r]);
        if (LANE == 0u) { team_sums[TEAM * N_R + r] = value; }
    }
    barrier();
    float scale = inversesqrt(mean);
    if (SWIGLU != 0u) {
        for (uint i = me; i < ROWS / 2u; i += LOCAL_SIZE) {
            if (base + 2u * i >= push.n_out) { break; }
            float gate = joined(2u * i, scale), up = joined(2u * i + 1u, scale);
            y[push.y_at + pair * (push.n_out / 2u) + base / 2u + i] = gate / (1.0 + exp(-gate)) * up;
        }
    } else {
        for (uint i = me; i < ROWS; i += LOCAL_SIZE) {
            if (base + i < push.n_out) { y[push.y_at + pair * push.n_out + base + i] = joined(i, scale); }
        }
    }
}
