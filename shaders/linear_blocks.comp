#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Product of a weight matrix with many rows of x (prompts), for GPUs: both tiles in shared memory, transposed, one chunk of
// 16 columns at a time; each invocation holds N_W x N_X sums, and the next chunk is under way while this one is used.
layout(constant_id = 0) const uint N_W = 8u;  // weight rows of an invocation: 4 or 8
layout(constant_id = 1) const uint N_X = 8u;  // rows of x of an invocation: 4 or 8
const uint W_LANES = 16u, X_LANES = 8u;       // invocations along weight rows, along rows of x

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { vec4 x_quads[]; };
layout(binding = 2) buffer Y { float y[]; };
#ifdef RESIDUAL
layout(binding = 3) readonly buffer Residual { float residual[]; };
#endif
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out;
    uint x_at; uint x_row; uint y_at; uint y_row;
    uint n_x; uint residual_at; uint residual_row; uint n_w_tiles;
} push;

#include "weights.glsl"
#include "blocks.glsl"

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    uint me = gl_LocalInvocationIndex;
    uint w_first = (WORKGROUP_INDEX % push.n_w_tiles) * TILE_W, x_first = (WORKGROUP_INDEX / push.n_w_tiles) * TILE_X;
    if (x_first >= push.n_x) { return; }
    uint w_lane = me % W_LANES, x_lane = me / W_LANES;
    uint n_chunks = push.n_in / 16u;
    const uint x_loads = TILE_X * 4u / 128u;

    float sums[N_W][N_X];
    [[unroll]] for (uint i = 0u; i < N_W; ++i) {
        [[unroll]] for (uint j = 0u; j < N_X; ++j) { sums[i][j] = 0.0; }
    }
    bool loads_w = me < TILE_W;
    uint w_row = min(w_first + me % TILE_W, push.n_out - 1u);
    Chunk w_next = load_chunk(planes, push.n_in, w_row, 0u);
    vec4 x_next[x_loads];
    [[unroll]] for (uint i = 0u; i < x_loads; ++i) {
        uint item = me + i * 128u;
        x_next[i] = x_quads[(push.x_at + min(x_first + item / 4u, push.n_x - 1u) * push.x_row) / 4u + item % 4u];
    }
    for (uint chunk = 0u; chunk < n_chunks; ++chunk) {
        barrier();
        if (loads_w) { put_weights(me, w_next); }
        [[unroll]] for (uint i = 0u; i < x_loads; ++i) {
            uint item = me + i * 128u;
            put_x(item / 4u, item % 4u, x_next[i]);
        }
        barrier();
        uint ahead = min(chunk + 1u, n_chunks - 1u);
        w_next = load_chunk(planes, push.n_in, w_row, ahead);
        [[unroll]] for (uint i = 0u; i < x_loads; ++i) {
            uint item = me + i * 128u;
            uint at = push.x_at + min(x_first + item / 4u, push.n_x - 1u) * push.x_row;
            x_next[i] = x_quads[at / 4u + ahead * 4u + item % 4u];
        }
        add_products(w_lane, x_lane, sums);
    }
    [[unroll]] for (uint j = 0u; j < N_X; ++j) {
        uint row = x_first + spread_row(x_lane, X_LANES, j);
        if (row >= push.n_x) { continue; }
#ifdef SWIGLU
        [[unroll]] for (uint i = 0u; i < N_W; i += 2u) {
            uint out_row = w_first + spread_row(w_lane, W_LANES, i);
            if (out_row < push.n_out) {
                float gate = sums[i][j];
                y[push.y_at + row * push.y_row + out_row / 2u] = gate / (1.0 + exp(-gate)) * sums[i + 1u][j];
            }
        }
#else
        [[unroll]] for (uint i = 0u; i < N_W; ++i) {
            uint out_row = w_first + spread_row(w_lane, W_LANES, i);
            if (out_row < push.n_out) {
                float value = sums[i][j];
#ifdef RESIDUAL
                value += residual[push.residual_at + row * push.residual_row + out_row];
#endif
                y[push.y_at + row * push.y_row + out_row] = value;
            }
        }
#endif
    }
}
