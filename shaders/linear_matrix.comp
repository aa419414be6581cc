#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#include "common.glsl"

// Product of a weight matrix with many rows of x (prompts) on cooperative matrices, f16 in and f32 out, with nearly the
// precision of f32: weights and x are sums of two f16 each (those of x from split_halves.comp), and three of the four
// products are taken. 32 columns at a time go through workgroup memory, the next ones being under way meanwhile.
// Subgroups of 32: SUB_M x SUB_N of them, each with M_TILES x N_TILES tiles of 16 x 16. K_PARTS workgroups share the columns
// of one result where there would be too few to fill the device; the last one to finish adds their sums in order.
layout(constant_id = 0) const uint M_TILES = 4u;  // along weight rows
layout(constant_id = 1) const uint N_TILES = 2u;  // along rows of x
layout(constant_id = 2) const uint K_PARTS = 1u;  // along columns
const uint SUB_M = 2u, SUB_N = 4u;
const uint TILE_M = SUB_M * 16u * M_TILES, TILE_N = SUB_N * 16u * N_TILES;
const uint PITCH = 5u;  // uvec4s of 32 columns, and one more, so that eight rows start in different banks
const uint X_ITEMS = TILE_N * 8u / LOCAL_SIZE;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { uvec4 x_quads[]; };
layout(binding = 1) readonly buffer XFloats { float x_floats[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(binding = 3) coherent buffer Partials { vec4 partials[]; };
layout(binding = 4) coherent buffer Counters { uint counters[]; };
#ifdef RESIDUAL
layout(binding = 5) readonly buffer Residual { float residual[]; };
#endif
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out;
    uint x_at; uint y_at; uint y_row;
    uint n_x; uint residual_at; uint residual_row; uint n_w_tiles; uint partials_at; uint counters_at;
} push;

#include "weights.glsl"

#ifndef W_F16
#define TWO_HALVES  // f16 weights are one
#endif

shared uvec4 w_tile[TILE_M * PITCH];
shared uvec4 high_tile[TILE_N * PITCH];
shared uvec4 low_tile[TILE_N * PITCH];
shared float results[SUB_M * SUB_N * 256u];
#ifdef TWO_HALVES
shared uvec4 w_low_tile[TILE_M * PITCH];
#endif

#define LAST_WORD w_tile[0].x
#include "last.glsl"

#define SUMS coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>

uvec4 packed(vec4 a, vec4 b) {
    return uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
}

// The part of a number that f16 has room for, cut off as in split_halves.comp.
vec4 high_part(vec4 v) { return uintBitsToFloat(floatBitsToUint(v) & 0xFFFFE000u); }

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    uint me = gl_LocalInvocationIndex;
    uint index = WORKGROUP_INDEX / K_PARTS, part = WORKGROUP_INDEX % K_PARTS;
    uint w_first = (index % push.n_w_tiles) * TILE_M, x_first = (index / push.n_w_tiles) * TILE_N;
    if (x_first >= push.n_x) { return; }
    uint sub_m = gl_SubgroupID % SUB_M * M_TILES * 16u, sub_n = gl_SubgroupID / SUB_M * N_TILES * 16u;
    uint n_steps = push.n_in / 32u, first_step = n_steps * part / K_PARTS, end_step = n_steps * (part + 1u) / K_PARTS;
    uint sums_at = push.x_at + push.n_x * push.n_in, factors_at = sums_at + push.n_x * (push.n_in / 16u);

    SUMS sums[M_TILES][N_TILES];
    [[unroll]] for (uint m = 0u; m < M_TILES; ++m) {
        [[unroll]] for (uint n = 0u; n < N_TILES; ++n) { sums[m][n] = SUMS(0.0); }
    }
    // An invocation brings 16 columns of one weight row, and 8 columns of some rows of x, larger or smaller halves.
    bool brings_w = me < 2u * TILE_M;
    uint w_row = min(w_first + me / 2u, push.n_out - 1u);
    Chunk w_next;
    uvec4 x_next[X_ITEMS];
    for (uint step = first_step; step <= end_step; ++step) {
        if (step > first_step) {
            barrier();
            if (brings_w) {
                [[unroll]] for (uint i = 0u; i < 2u; ++i) {
                    vec4 a = weights(w_next, 2u * i), b = weights(w_next, 2u * i + 1u);
                    vec4 high_a = high_part(a), high_b = high_part(b);
                    uint at = me / 2u * PITCH + me % 2u * 2u + i;
                    w_tile[at] = packed(high_a, high_b);
#ifdef TWO_HALVES
                    w_low_tile[at] = packed(a - high_a, b - high_b);
#endif
                }
            }
            [[unroll]] for (uint k = 0u; k < X_ITEMS; ++k) {
                uint item = me + k * LOCAL_SIZE, at = item / 8u * PITCH + item % 4u;
                if (item % 8u < 4u) { high_tile[at] = x_next[k]; } else { low_tile[at] = x_next[k]; }
            }
            barrier();
        }
        if (step < end_step) {
            if (brings_w) { w_next = load_chunk(planes, push.n_in, w_row, 2u * step + me % 2u); }
            [[unroll]] for (uint k = 0u; k < X_ITEMS; ++k) {
                uint item = me + k * LOCAL_SIZE, row = min(x_first + item / 8u, push.n_x - 1u);
                x_next[k] = x_quads[(push.x_at + row * push.n_in) / 4u + step * 8u + item % 8u];
            }
        }
        if (step > first_step) {
            [[unroll]] for (uint h = 0u; h < 2u; ++h) {
                // glslang 13 forgets the use of a second matrix in one declaration.
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> high[N_TILES];
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> low[N_TILES];
                [[unroll]] for (uint n = 0u; n < N_TILES; ++n) {
                    uint at = (sub_n + n * 16u) * PITCH + h * 2u;
                    coopMatLoad(high[n], high_tile, at, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                    coopMatLoad(low[n], low_tile, at, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                }
                [[unroll]] for (uint m = 0u; m < M_TILES; ++m) {
                    uint at = (sub_m + m * 16u) * PITCH + h * 2u;
                    coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> w;
                    coopMatLoad(w, w_tile, at, PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    [[unroll]] for (uint n = 0u; n < N_TILES; ++n) {
                        sums[m][n] = coopMatMulAdd(w, low[n], sums[m][n]);
                        sums[m][n] = coopMatMulAdd(w, high[n], sums[m][n]);
                    }
#ifdef TWO_HALVES
                    coopMatLoad(w, w_low_tile, at, PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    [[unroll]] for (uint n = 0u; n < N_TILES; ++n) { sums[m][n] = coopMatMulAdd(w, high[n], sums[m][n]); }
#endif
                }
            }
        }
    }

    uint lane = gl_SubgroupInvocationID, mine = gl_SubgroupID * 256u;
    // An invocation has 8 columns of a row of each tile: two quads of it.
    const uint SUBS = SUB_M * SUB_N, QUADS = M_TILES * N_TILES * SUBS * 64u;  // of a workgroup's partial result
    uint first_quad = push.partials_at / 4u + index * K_PARTS * QUADS + gl_SubgroupID * 64u + lane * 2u;
    if (K_PARTS > 1u) {
        [[unroll]] for (uint n = 0u; n < N_TILES; ++n) {
            [[unroll]] for (uint m = 0u; m < M_TILES; ++m) {
                subgroupBarrier();
                coopMatStore(sums[m][n], results, mine, 16u, gl_CooperativeMatrixLayoutColumnMajor);
                subgroupBarrier();
                uint at = first_quad + part * QUADS + (n * M_TILES + m) * SUBS * 64u, from = mine + lane * 8u;
                [[unroll]] for (uint j = 0u; j < 2u; ++j) {
                    uint i = from + 4u * j;
                    partials[at + j] = vec4(results[i], results[i + 1u], results[i + 2u], results[i + 3u]);
                }
            }
        }
        if (!last_of(K_PARTS, push.counters_at + index)) { return; }
    }
    [[unroll]] for (uint n = 0u; n < N_TILES; ++n) {
        [[unroll]] for (uint m = 0u; m < M_TILES; ++m) {
            float sum[8];
            if (K_PARTS > 1u) {
                uint at = first_quad + (n * M_TILES + m) * SUBS * 64u;
                vec4 a = vec4(0.0), b = vec4(0.0);
                [[unroll]] for (uint p = 0u; p < K_PARTS; ++p) {
                    a += partials[at + p * QUADS];
                    b += partials[at + p * QUADS + 1u];
                }
                [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                    sum[i] = a[i];
                    sum[i + 4u] = b[i];
                }
            } else {
                subgroupBarrier();
                coopMatStore(sums[m][n], results, mine, 16u, gl_CooperativeMatrixLayoutColumnMajor);
                subgroupBarrier();
                [[unroll]] for (uint i = 0u; i < 8u; ++i) { sum[i] = results[mine + lane * 8u + i]; }
            }
            uint row = x_first + sub_n + n * 16u + lane / 2u, column = w_first + sub_m + m * 16u + lane % 2u * 8u;
            if (row < push.n_x) {
                float factor = x_floats[factors_at + row];
#ifdef SWIGLU
                [[unroll]] for (uint i = 0u; i < 8u; i += 2u) {
                    float gate = sum[i] * factor, up = sum[i + 1u] * factor;
                    if (column + i < push.n_out) {
                        y[push.y_at + row * push.y_row + (column + i) / 2u] = gate / (1.0 + exp(-gate)) * up;
                    }
                }
#else
                [[unroll]] for (uint i = 0u; i < 8u; ++i) {
                    if (column + i < push.n_out) {
                        float value = sum[i] * factor;
#ifdef RESIDUAL
                        value += residual[push.residual_at + row * push.residual_row + column + i];
#endif
                        y[push.y_at + row * push.y_row + column + i] = value;
                    }
                }
#endif
            }
        }
    }
}
