#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Attention of one row over one chunk of CHUNK keys, for HEADS query heads that share a kv head. Each invocation scores
// one key for all heads; then each owns some dims and sums p * v over the keys in order. With one chunk the result is
// finished here (DIRECT); else (max, sum, acc) go to attention_combine, which does the same arithmetic.
layout(constant_id = 0) const uint HEADS = 1u;
layout(constant_id = 1) const uint DIRECT = 0u;
layout(constant_id = 2) const uint DIM = 128u;   // head size
layout(constant_id = 3) const uint BLOCK = 8u;   // 16-byte loads of a key under way at a time; divides DIM / 4
const uint KEYS = 8u;                            // loads of v under way at a time

const uint CHUNK = 128u, MAX_HEADS = 4u, MAX_DIM = 256u;

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Q { vec4 q[]; };
layout(binding = 1) readonly buffer KCache { vec4 k_cache[]; };
layout(binding = 2) readonly buffer VCache { float v_cache[]; };
layout(binding = 3) readonly buffer Step { int step_values[]; };
layout(binding = 4) readonly buffer Gate { float gate[]; };
layout(binding = 5) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint q_at; uint k_cache_at; uint v_cache_at; uint step_at; uint step_row;
    uint gate_at; uint gate_row; uint gate_head; uint y_at;
    uint n_rows; uint n_tokens; uint n_head; uint n_head_kv; uint n_ctx; uint n_chunks; float scale;
} push;

const uint DIMS = (DIM + 127u) / 128u;           // dims of a result that one invocation owns

shared vec4 q_tile[MAX_HEADS * MAX_DIM / 4u];
shared float p_tile[MAX_HEADS * CHUNK];
shared float team_partial[TEAMS * MAX_HEADS];

void main() {
    uint me = gl_LocalInvocationIndex;
    uint groups = push.n_head / HEADS;  // of query heads
    uint index = WORKGROUP_INDEX;
    uint group = index % groups, chunk = index / groups % push.n_chunks, row = index / groups / push.n_chunks;
    if (row >= push.n_rows) { return; }
    uint s = row / push.n_tokens;
    uint position = uint(step_values[push.step_at + s]) + row % push.n_tokens;
    if (chunk * CHUNK > position) { return; }
    uint n_keys = min(CHUNK, position + 1u - chunk * CHUNK);
    uint head = group * HEADS;
    uint kv_head = head / (push.n_head / push.n_head_kv);
    const uint dim4 = DIM / 4u;
    uint key_row = push.n_head_kv * DIM;
    uint first_key = uint(step_values[push.step_at + push.step_row + s]) * push.n_ctx + chunk * CHUNK;

    for (uint i = me; i < HEADS * dim4; i += 128u) {
        // Scaled here: after the sums, one variant could contract scale and maximum into an fma and another not.
        q_tile[i] = q[push.q_at / 4u + (row * push.n_head + head) * dim4 + i] * push.scale;
    }
    barrier();
    float score[HEADS];
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) { score[h] = 0.0; }
    uint k_at = (push.k_cache_at + (first_key + min(me, n_keys - 1u)) * key_row + kv_head * DIM) / 4u;
    for (uint i0 = 0u; i0 < dim4; i0 += BLOCK) {
        vec4 k[BLOCK];
        [[unroll]] for (uint i = 0u; i < BLOCK; ++i) { k[i] = k_cache[k_at + i0 + i]; }
        [[unroll]] for (uint i = 0u; i < BLOCK; ++i) {
            [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                vec4 v = q_tile[h * dim4 + i0 + i];
                score[h] = fma(k[i].x, v.x, fma(k[i].y, v.y, fma(k[i].z, v.z, fma(k[i].w, v.w, score[h]))));
            }
        }
    }
    // The maximum and the sum of all heads together: one pair of barriers each.
    float best[HEADS], total[HEADS], p[HEADS];
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        if (me >= n_keys) { score[h] = -3.0e38; }
        float team_best = team_max(score[h]);
        if (LANE == 0u) { team_partial[TEAM * HEADS + h] = team_best; }
    }
    barrier();
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        best[h] = team_partial[h];
        for (uint i = 1u; i < TEAMS; ++i) { best[h] = max(best[h], team_partial[i * HEADS + h]); }
        p[h] = me < n_keys ? exp(score[h] - best[h]) : 0.0;
        p_tile[h * CHUNK + me] = p[h];
    }
    barrier();
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        float team_total = team_add(p[h]);
        if (LANE == 0u) { team_partial[TEAM * HEADS + h] = team_total; }
    }
    barrier();
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        total[h] = 0.0;
        for (uint i = 0u; i < TEAMS; ++i) { total[h] += team_partial[i * HEADS + h]; }
    }
    float acc[HEADS][DIMS];
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        [[unroll]] for (uint j = 0u; j < DIMS; ++j) { acc[h][j] = 0.0; }
    }
    uint v_at = push.v_cache_at + first_key * key_row + kv_head * DIM;
    for (uint key0 = 0u; key0 < n_keys; key0 += KEYS) {
        float v[KEYS][DIMS];
        // Beyond the last key its v is loaded again: p is 0 there, while what the cache holds may be NaN.
        [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
            uint at = v_at + min(key0 + i, n_keys - 1u) * key_row;
            [[unroll]] for (uint j = 0u; j < DIMS; ++j) { v[i][j] = v_cache[at + min(me + j * 128u, DIM - 1u)]; }
        }
        [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
            [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                float weight = p_tile[h * CHUNK + key0 + i];
                [[unroll]] for (uint j = 0u; j < DIMS; ++j) { acc[h][j] = fma(weight, v[i][j], acc[h][j]); }
            }
        }
    }
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        uint item = row * push.n_head + head + h;
        [[unroll]] for (uint j = 0u; j < DIMS; ++j) {
            uint d = me + j * 128u;
            if (d >= DIM) { continue; }
            if (DIRECT == 1u) {
                float g = gate[push.gate_at + row * push.gate_row + (head + h) * push.gate_head + d];
                y[push.y_at + item * DIM + d] = acc[h][j] / total[h] / (1.0 + exp(-g));
            } else {
                uint at = push.y_at + (item * push.n_chunks + chunk) * (DIM + 2u);
                y[at + 2u + d] = acc[h][j];
                if (d == 0u) { y[at] = best[h]; y[at + 1u] = total[h]; }
            }
        }
    }
}
