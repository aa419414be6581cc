#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Products of the experts' weights with many rows of x (prompts). A workgroup takes 128 weight rows of one expert and a tile
// of the pairs that chose it (moe_group): both in shared memory, transposed, one chunk of 16 columns at a time; an
// invocation holds N_W x N_X sums, and the next chunk is under way while this one is used.
layout(constant_id = 0) const uint X_LANES = 8u;  // invocations along pairs: 4 or 8
layout(constant_id = 1) const uint N_X = 4u;      // pairs of an invocation: 4 or 8
layout(constant_id = 2) const uint SWIGLU = 0u;   // n_out / 2 gate rows and then as many up rows in each expert
const uint W_LANES = 128u / X_LANES, N_W = X_LANES;

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { vec4 x_quads[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(binding = 3) readonly buffer Pairs { uint pairs[]; };
layout(binding = 4) readonly buffer Tiles { uint tiles[]; };
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out; uint first_expert; uint n_experts;
    uint x_at; uint x_row; uint x_divisor; uint y_at; uint y_row;
    uint pairs_at; uint tiles_at; uint n_tiles; uint n_w_tiles;
} push;

#include "weights.glsl"
#include "blocks.glsl"

const uint X_LOADS = (TILE_X * 4u + 127u) / 128u;  // quads of x that an invocation brings per chunk

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    uint me = gl_LocalInvocationIndex;
    uint tile = WORKGROUP_INDEX / push.n_w_tiles, w_first = WORKGROUP_INDEX % push.n_w_tiles * TILE_W;
    if (tile >= push.n_tiles) { return; }
    uint at = push.tiles_at + tile * 3u;
    uint expert = tiles[at] - push.first_expert, first_pair = push.pairs_at + tiles[at + 1u], n_pairs = tiles[at + 2u];
    if (n_pairs == 0u || expert >= push.n_experts) { return; }
    uint w_lane = me % W_LANES, x_lane = me / W_LANES;
    uint n_chunks = push.n_in / 16u;

    float sums[N_W][N_X];
    [[unroll]] for (uint i = 0u; i < N_W; ++i) {
        [[unroll]] for (uint j = 0u; j < N_X; ++j) { sums[i][j] = 0.0; }
    }
    uint w_row = min(w_first + me, push.n_out - 1u);
    if (SWIGLU != 0u) { w_row = w_row % 2u * (push.n_out / 2u) + w_row / 2u; }  // gate and up in turns
    w_row += expert * push.n_out;
    Chunk w_next = load_chunk(planes, push.n_in, w_row, 0u);
    uint x_from[X_LOADS];
    vec4 x_next[X_LOADS];
    [[unroll]] for (uint i = 0u; i < X_LOADS; ++i) {
        uint item = me + i * 128u;
        uint row = pairs[first_pair + min(item / 4u, n_pairs - 1u)] / push.x_divisor;
        x_from[i] = (push.x_at + row * push.x_row) / 4u + item % 4u;
        x_next[i] = x_quads[x_from[i]];
    }
    for (uint chunk = 0u; chunk < n_chunks; ++chunk) {
        barrier();
        put_weights(me, w_next);
        [[unroll]] for (uint i = 0u; i < X_LOADS; ++i) {
            uint item = me + i * 128u;
            if (item / 4u < TILE_X) { put_x(item / 4u, item % 4u, x_next[i]); }
        }
        barrier();
        uint ahead = min(chunk + 1u, n_chunks - 1u);
        w_next = load_chunk(planes, push.n_in, w_row, ahead);
        [[unroll]] for (uint i = 0u; i < X_LOADS; ++i) { x_next[i] = x_quads[x_from[i] + ahead * 4u]; }
        add_products(w_lane, x_lane, sums);
    }
    [[unroll]] for (uint j = 0u; j < N_X; ++j) {
        uint place = spread_row(x_lane, X_LANES, j);
        if (place >= n_pairs) { continue; }
        uint to = push.y_at + pairs[first_pair + place] * push.y_row;
        [[unroll]] for (uint i = 0u; i < N_W; i += 2u) {
            uint row = w_first + spread_row(w_lane, W_LANES, i);
            float one = sums[i][j], two = sums[i + 1u][j];
            if (SWIGLU != 0u) {
                if (row < push.n_out) { y[to + row / 2u] = one / (1.0 + exp(-one)) * two; }
            } else {
                if (row < push.n_out) { y[to + row] = one; }
                if (row + 1u < push.n_out) { y[to + row + 1u] = two; }
            }
        }
    }
}
