#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Attention of many rows (prompts), as in flash attention (Dao et al. 2022). A workgroup takes QUERIES queries, rows
// times HEADS query heads of one kv head, and walks a span of keys KEYS at a time with a running maximum:
//   scores   a team holds QUERIES / TEAMS queries, a lane 4 of the keys; dims pass through shared memory in slices
//   values   an invocation holds OWN_QUERIES x OWN_QUADS accumulators; weights come from shared memory, v from memory
// With one span the result is finished here (DIRECT); else (max, sum, acc) go to attention_combine.
// Every sum runs over dims or keys in order: a row's result does not depend on which rows share its tile.
layout(constant_id = 0) const uint HEADS = 1u;          // divides QUERIES and n_head / n_head_kv
layout(constant_id = 1) const uint DIRECT = 0u;
layout(constant_id = 2) const uint DIM = 128u;          // head size
layout(constant_id = 3) const uint TEAM_QUERIES = 4u;   // queries of a team: QUERIES / TEAMS
layout(constant_id = 4) const uint DIM_GROUPS = 32u;    // a power of 2 from 8 to 32
layout(constant_id = 5) const uint OWN_QUADS = 1u;      // OWN_QUADS * DIM_GROUPS * 4 >= DIM

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Q { vec4 q[]; };
layout(binding = 1) readonly buffer KCache { vec4 k_cache[]; };
layout(binding = 2) readonly buffer VCache { vec4 v_cache[]; };
layout(binding = 3) readonly buffer Step { int step_values[]; };
layout(binding = 4) readonly buffer Gate { float gate[]; };
layout(binding = 5) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint q_at; uint k_cache_at; uint v_cache_at; uint step_at; uint step_row;
    uint gate_at; uint gate_row; uint gate_head; uint y_at;
    uint n_seqs; uint n_tokens; uint n_head; uint n_head_kv; uint n_ctx; uint n_spans; uint span; float scale;
} push;

const uint KEYS = 32u, SLICE = 8u, PITCH = SLICE + 1u;  // keys in a tile; quads in a slice of dims, and with padding
const uint QUERIES = TEAM_QUERIES * TEAMS;
const uint ROWS = QUERIES / HEADS;
const uint DIM4 = DIM / 4u;
const uint SLICES = (DIM4 + SLICE - 1u) / SLICE;
const uint OWN_QUERIES = QUERIES * DIM_GROUPS / uint(LOCAL_SIZE);
const uint STAGED_Q = QUERIES * SLICE / uint(LOCAL_SIZE), STAGED_K = KEYS * SLICE / uint(LOCAL_SIZE);
const float NEVER = -3.0e38;                            // the score of a key that a query may not see

shared vec4 tile[(QUERIES + KEYS) * PITCH];             // slices of q and k; then the weights [QUERIES][KEYS / 4]
shared float rescale[QUERIES], query_best[QUERIES];     // by query, for those that hold its accumulators

uint first_row, n_tile_rows, head0, q_quad0, k_quad0, key_pitch;

// Quad `column` of query m of the tile; rows beyond the last repeat it and are not written.
vec4 q_quad(uint m, uint column) {
    uint row = min(m / HEADS, n_tile_rows - 1u);
    return column < DIM4 ? q[q_quad0 + (row * push.n_head + m % HEADS) * DIM4 + column] * push.scale : vec4(0.0);
}

vec4 k_quad(uint key, uint column) {
    return column < DIM4 ? k_cache[k_quad0 + key * key_pitch + column] : vec4(0.0);
}

void main() {
    uint me = gl_LocalInvocationIndex;
    uint index = WORKGROUP_INDEX;
    uint head_groups = push.n_head / HEADS, row_tiles = (push.n_tokens + ROWS - 1u) / ROWS;
    head0 = index % head_groups * HEADS;
    index /= head_groups;
    uint s = index % push.n_seqs;
    index /= push.n_seqs;
    uint span = index % push.n_spans;
    index /= push.n_spans;
    if (index >= row_tiles) { return; }
    uint t0 = (row_tiles - 1u - index) * ROWS;  // the longest first
    n_tile_rows = min(ROWS, push.n_tokens - t0);
    first_row = s * push.n_tokens + t0;
    uint position0 = uint(step_values[push.step_at + s]) + t0;
    uint n_keys = min(position0 + n_tile_rows, (span + 1u) * push.span);  // one past the last key to look at
    if (span * push.span >= n_keys) { return; }
    uint kv_head = head0 / (push.n_head / push.n_head_kv);
    q_quad0 = push.q_at / 4u + (first_row * push.n_head + head0) * DIM4;
    key_pitch = push.n_head_kv * DIM4;
    uint sequence = uint(step_values[push.step_at + push.step_row + s]) * push.n_ctx * key_pitch + kv_head * DIM4;
    k_quad0 = push.k_cache_at / 4u + sequence;
    uint v_quad0 = push.v_cache_at / 4u + sequence;

    uint dim_group = me % DIM_GROUPS, own = me / DIM_GROUPS * OWN_QUERIES;
    vec4 acc[OWN_QUERIES][OWN_QUADS];
    [[unroll]] for (uint m = 0u; m < OWN_QUERIES; ++m) {
        [[unroll]] for (uint j = 0u; j < OWN_QUADS; ++j) { acc[m][j] = vec4(0.0); }
    }
    float best[TEAM_QUERIES], total[TEAM_QUERIES];
    [[unroll]] for (uint i = 0u; i < TEAM_QUERIES; ++i) { best[i] = NEVER; total[i] = 0.0; }

    for (uint key0 = span * push.span; key0 < n_keys; key0 += KEYS) {
        vec4 score[TEAM_QUERIES];  // of keys key0 + 4 * LANE ..
        [[unroll]] for (uint i = 0u; i < TEAM_QUERIES; ++i) { score[i] = vec4(0.0); }
        vec4 next_q[STAGED_Q], next_k[STAGED_K];
        for (uint slice = 0u; slice <= SLICES; ++slice) {
            // Loads are one slice ahead of their use.
            if (slice > 0u) {
                barrier();
                // Query m lies in row (m % TEAM_QUERIES) * TEAMS + m / TEAM_QUERIES, key n in row n % 4 * 8 + n / 4:
                // what neighbours read together then lies in different banks.
                [[unroll]] for (uint i = 0u; i < STAGED_Q; ++i) {
                    uint at = me + i * uint(LOCAL_SIZE), m = at / SLICE;
                    tile[(m % TEAM_QUERIES * TEAMS + m / TEAM_QUERIES) * PITCH + at % SLICE] = next_q[i];
                }
                [[unroll]] for (uint i = 0u; i < STAGED_K; ++i) {
                    uint at = me + i * uint(LOCAL_SIZE), n = at / SLICE;
                    tile[(QUERIES + n % 4u * LANES + n / 4u) * PITCH + at % SLICE] = next_k[i];
                }
                barrier();
            }
            if (slice < SLICES) {
                [[unroll]] for (uint i = 0u; i < STAGED_Q; ++i) {
                    uint at = me + i * uint(LOCAL_SIZE);
                    next_q[i] = q_quad(at / SLICE, slice * SLICE + at % SLICE);
                }
                [[unroll]] for (uint i = 0u; i < STAGED_K; ++i) {
                    uint at = me + i * uint(LOCAL_SIZE);
                    next_k[i] = k_quad(min(key0 + at / SLICE, n_keys - 1u), slice * SLICE + at % SLICE);
                }
            }
            if (slice > 0u) {
                [[unroll]] for (uint d = 0u; d < SLICE; ++d) {
                    vec4 k[4];
                    [[unroll]] for (uint n = 0u; n < 4u; ++n) { k[n] = tile[(QUERIES + n * LANES + LANE) * PITCH + d]; }
                    [[unroll]] for (uint i = 0u; i < TEAM_QUERIES; ++i) {
                        vec4 x = tile[(i * TEAMS + TEAM) * PITCH + d];
                        [[unroll]] for (uint n = 0u; n < 4u; ++n) {
                            float sum = fma(x.z, k[n].z, fma(x.w, k[n].w, score[i][n]));
                            score[i][n] = fma(x.x, k[n].x, fma(x.y, k[n].y, sum));
                        }
                    }
                }
            }
        }
        uvec4 keys = uvec4(key0 + 4u * LANE) + uvec4(0u, 1u, 2u, 3u);
        float factor[TEAM_QUERIES];
        [[unroll]] for (uint i = 0u; i < TEAM_QUERIES; ++i) {
            uint row = min((TEAM * TEAM_QUERIES + i) / HEADS, n_tile_rows - 1u);
            bvec4 seen = lessThanEqual(keys, uvec4(position0 + row));
            vec4 x = mix(vec4(NEVER), score[i], seen);
            float now = max(best[i], team_max(max(max(x.x, x.y), max(x.z, x.w))));
            vec4 p = mix(vec4(0.0), exp(x - now), seen);
            factor[i] = exp(best[i] - now);
            total[i] = fma(total[i], factor[i], (p.x + p.y) + (p.z + p.w));
            best[i] = now;
            score[i] = p;
        }
        barrier();
        [[unroll]] for (uint i = 0u; i < TEAM_QUERIES; ++i) {
            uint m = TEAM * TEAM_QUERIES + i;
            tile[m * SLICE + LANE] = score[i];
            if (LANE == 0u) { rescale[m] = factor[i]; }
        }
        barrier();
        [[unroll]] for (uint m = 0u; m < OWN_QUERIES; ++m) {
            float f = rescale[own + m];
            [[unroll]] for (uint j = 0u; j < OWN_QUADS; ++j) { acc[m][j] *= f; }
        }
        for (uint n0 = 0u; n0 < KEYS / 4u; ++n0) {
            vec4 v[4][OWN_QUADS];
            // Beyond the last key its v is loaded again: weights are 0 there, while what the cache holds may be NaN.
            [[unroll]] for (uint n = 0u; n < 4u; ++n) {
                uint at = v_quad0 + min(key0 + 4u * n0 + n, n_keys - 1u) * key_pitch;
                [[unroll]] for (uint j = 0u; j < OWN_QUADS; ++j) {
                    v[n][j] = v_cache[at + min(dim_group + j * DIM_GROUPS, DIM4 - 1u)];
                }
            }
            bool all_seen = key0 + 4u * n0 + 3u <= position0;  // by every row of the tile
            [[unroll]] for (uint m = 0u; m < OWN_QUERIES; ++m) {
                vec4 p = tile[(own + m) * SLICE + n0];
                if (all_seen) {
                    [[unroll]] for (uint j = 0u; j < OWN_QUADS; ++j) {
                        [[unroll]] for (uint n = 0u; n < 4u; ++n) { acc[m][j] = fma(vec4(p[n]), v[n][j], acc[m][j]); }
                    }
                } else {  // weights of later keys are 0, but 0 * NaN is NaN: a bad row must not reach earlier ones
                    uint last = position0 + (own + m) / HEADS;
                    [[unroll]] for (uint j = 0u; j < OWN_QUADS; ++j) {
                        [[unroll]] for (uint n = 0u; n < 4u; ++n) {
                            bvec4 seen = bvec4(key0 + 4u * n0 + n <= last);
                            acc[m][j] = fma(vec4(p[n]), mix(vec4(0.0), v[n][j], seen), acc[m][j]);
                        }
                    }
                }
            }
        }
    }

    [[unroll]] for (uint i = 0u; i < TEAM_QUERIES; ++i) {
        float sum = team_add(total[i]);
        if (LANE == 0u) { query_best[TEAM * TEAM_QUERIES + i] = best[i]; }
        total[i] = sum;
    }
    barrier();  // all have read `rescale`; from here on it holds the sums
    [[unroll]] for (uint i = 0u; i < TEAM_QUERIES; ++i) {
        if (LANE == 0u) { rescale[TEAM * TEAM_QUERIES + i] = total[i]; }
    }
    barrier();
    [[unroll]] for (uint m = 0u; m < OWN_QUERIES; ++m) {
        uint row = (own + m) / HEADS, head = head0 + (own + m) % HEADS;
        if (row >= n_tile_rows) { continue; }
        row += first_row;
        [[unroll]] for (uint j = 0u; j < OWN_QUADS; ++j) {
            uint column = dim_group + j * DIM_GROUPS;
            if (column >= DIM4) { continue; }
            [[unroll]] for (uint c = 0u; c < 4u; ++c) {
                uint d = 4u * column + c;
                if (DIRECT == 1u) {
                    float g = gate[push.gate_at + row * push.gate_row + head * push.gate_head + d];
                    float mixed = acc[m][j][c] / rescale[own + m];
                    y[push.y_at + (row * push.n_head + head) * DIM + d] = mixed / (1.0 + exp(-g));
                } else {
                    uint at = push.y_at + ((row * push.n_head + head) * push.n_spans + span) * (DIM + 2u);
                    y[at + 2u + d] = acc[m][j][c];
                    if (d == 0u) { y[at] = query_best[own + m]; y[at + 1u] = rescale[own + m]; }
                }
            }
        }
    }
}
