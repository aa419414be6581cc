#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Product of a weight matrix with many rows of x (prompts): a workgroup computes 64 weight rows x 32 rows of x, with
// tiles of 32 columns in shared memory; each invocation holds 4 x 4 sums.
const uint TILE_W = 64u, TILE_X = 32u, TILE_K = 32u, PITCH = TILE_K + 1u;

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { float x[]; };
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

shared float w_tile[TILE_W * PITCH];
shared float x_tile[TILE_X * PITCH];

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    uint me = gl_LocalInvocationIndex;
    uint w_first = (WORKGROUP_INDEX % push.n_w_tiles) * TILE_W;
    uint x_first = (WORKGROUP_INDEX / push.n_w_tiles) * TILE_X;
    if (x_first >= push.n_x) { return; }
    uint my_w = (me % 16u) * 4u, my_x = (me / 16u) * 4u;
    float sums[4][4];
    [[unroll]] for (uint i = 0u; i < 4u; ++i) { [[unroll]] for (uint j = 0u; j < 4u; ++j) { sums[i][j] = 0.0; } }

    for (uint k = 0u; k < push.n_in; k += TILE_K) {
        barrier();
        {
            uint row = me / 2u, half_of = me % 2u;
            uint chunk = k / 16u + half_of;
            uint at = row * PITCH + half_of * 16u;
            bool inside = chunk * 16u < push.n_in;
            Chunk c = load_chunk(planes, push.n_in, min(w_first + row, push.n_out - 1u), inside ? chunk : 0u);
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                vec4 w = unpack(c, i) * c.factor;
#ifdef HAS_OFFSET
                w -= c.offset;
#endif
                [[unroll]] for (uint j = 0u; j < 4u; ++j) { w_tile[at + 4u * i + j] = inside ? w[j] : 0.0; }
            }
        }
        for (uint i = me; i < TILE_X * TILE_K; i += 128u) {
            uint row = i / TILE_K, col = i % TILE_K;
            uint x_at = push.x_at + min(x_first + row, push.n_x - 1u) * push.x_row + k + col;
            x_tile[row * PITCH + col] = k + col < push.n_in ? x[x_at] : 0.0;
        }
        barrier();
        for (uint col = 0u; col < TILE_K; ++col) {
            float a[4], b[4];
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                a[i] = w_tile[(my_w + i) * PITCH + col];
                b[i] = x_tile[(my_x + i) * PITCH + col];
            }
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                [[unroll]] for (uint j = 0u; j < 4u; ++j) { sums[i][j] = fma(a[i], b[j], sums[i][j]); }
            }
        }
    }
    [[unroll]] for (uint j = 0u; j < 4u; ++j) {
        uint row = x_first + my_x + j;
        if (row >= push.n_x) { continue; }
#ifdef SWIGLU
        [[unroll]] for (uint i = 0u; i < 4u; i += 2u) {
            uint out_row = w_first + my_w + i;
            if (out_row < push.n_out) {
                float gate = sums[i][j];
                y[push.y_at + row * push.y_row + out_row / 2u] = gate / (1.0 + exp(-gate)) * sums[i + 1u][j];
            }
        }
#else
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            uint out_row = w_first + my_w + i;
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
