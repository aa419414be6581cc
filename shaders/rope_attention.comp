#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"
#include "turns.glsl"

// All of a decode step's attention between its two products. A workgroup takes one row, HEADS query heads of one kv head
// and one part of the keys:
//   rope     RMS norm and RoPE of its queries and of the batch's own keys that it sees, into shared memory. These rows
//            never come from the cache: the workgroup of a row's last part writes them there in this same dispatch.
//   scores   CHUNK keys at a time, one an invocation, for all heads
//   values   each invocation owns some dims and sums p * v over the keys in order
//   join     the workgroup that finishes last joins the parts of a row and applies the output gate
// What is a chunk and a part follows from the row's position alone.
layout(constant_id = 0) const uint HEADS = 1u;
layout(constant_id = 1) const uint DIM = 128u;       // head size
layout(constant_id = 2) const uint HALF_ROT = 16u;   // rotated pairs
layout(constant_id = 3) const uint BLOCK = 8u;       // 16-byte loads of a key under way at a time; divides DIM / 4

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Projection { float p[]; };
layout(binding = 1) readonly buffer Norms { float norms[]; };
layout(binding = 2) readonly buffer Table { uint table[]; };
layout(binding = 3) readonly buffer Step { int step_values[]; };
layout(binding = 4) buffer KCache { vec4 k_cache[]; };
layout(binding = 5) buffer VCache { float v_cache[]; };
layout(binding = 6) coherent buffer Partials { float partials[]; };
layout(binding = 7) coherent buffer Counters { uint counters[]; };
layout(binding = 8) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint qg_at; uint qg_row; uint k_at; uint k_row; uint v_at; uint v_row;
    uint q_norm_at; uint k_norm_at; uint table_at; uint step_at; uint step_row;
    uint k_cache_at; uint v_cache_at; uint partials_at; uint counters_at; uint y_at;
    uint n_rows; uint n_tokens; uint n_head; uint n_head_kv; uint n_ctx; uint n_parts; uint most_parts;
    float scale; float eps;
} push;

#include "last.glsl"

const uint CHUNK = 128u;
const uint FRESH = 8u;                   // keys of the batch that shared memory holds at a time
const uint KEYS = 8u;                    // loads of v under way at a time
const uint DIM4 = DIM / 4u;
const uint PITCH = DIM4 + 1u;            // quads from vector to vector: neighbours lie in different banks
const uint OWN = (DIM + 127u) / 128u;    // dims of a result that one invocation owns

shared vec4 tile[(HEADS + FRESH) * PITCH];  // queries, then keys of the batch
shared float scales[HEADS + FRESH];
shared float p_tile[HEADS * CHUNK];
shared float team_partial[TEAMS * HEADS];

uint row, head0, kv_head, first_row, n_past, slot;

// Word of vector i of the tile in the projection; keys are those of the batch's rows from t0 on.
uint source(uint i, uint t0) {
    return i < HEADS ? push.qg_at + row * push.qg_row + (head0 + i) * 2u * DIM
                     : push.k_at + (first_row + t0 + i - HEADS) * push.k_row + kv_head * DIM;
}

// Norm and RoPE of vectors [from, to) of the tile.
void rope(uint from, uint to, uint t0) {
    uint me = gl_LocalInvocationIndex;
    for (uint i = me; i < (to - from) * DIM4; i += 128u) {
        uint vector = from + i / DIM4, quad = i % DIM4, at = source(vector, t0) + 4u * quad;
        tile[vector * PITCH + quad] = vec4(p[at], p[at + 1u], p[at + 2u], p[at + 3u]);
    }
    barrier();
    for (uint v0 = from; v0 < to; v0 += TEAMS) {
        uint vector = min(v0 + TEAM, to - 1u);
        float sum = 0.0;
        for (uint i = LANE; i < DIM4; i += LANES) {
            vec4 x = tile[vector * PITCH + i];
            sum = fma(x.x, x.x, fma(x.y, x.y, fma(x.z, x.z, fma(x.w, x.w, sum))));
        }
        precise float scale = inversesqrt(team_add(sum) / float(DIM) + push.eps);
        scales[vector] = scale;
    }
    barrier();
    // Items of the rotated part take pairs (i, i + HALF_ROT); the others single dims beyond both halves.
    const uint items = DIM - HALF_ROT;
    for (uint n = me; n < (to - from) * items; n += 128u) {
        uint vector = from + n / items, i = n % items;
        bool is_q = vector < HEADS, rotates = i < HALF_ROT;
        uint norm_at = is_q ? push.q_norm_at : push.k_norm_at, base = vector * PITCH;
        uint a = rotates ? i : i + HALF_ROT, b = i + HALF_ROT;
        // Queries are scaled here: after the sums, one variant could contract scale and maximum into an fma.
        float factor = is_q ? push.scale : 1.0;
        precise float x0 = tile[base + a / 4u][a % 4u] * scales[vector] * norms[norm_at + a];
        if (rotates) {
            uint position = n_past + (is_q ? row - first_row : t0 + vector - HEADS);
            precise float x1 = tile[base + b / 4u][b % 4u] * scales[vector] * norms[norm_at + b];
            vec2 cs = cos_sin_turns(turns_at(position, table[push.table_at + 2u * i], table[push.table_at + 2u * i + 1u]));
            tile[base + a / 4u][a % 4u] = fma(x0, cs.x, -(x1 * cs.y)) * factor;
            tile[base + b / 4u][b % 4u] = fma(x0, cs.y, x1 * cs.x) * factor;
        } else {
            tile[base + a / 4u][a % 4u] = x0 * factor;
        }
    }
    barrier();
}

void finish(uint h, uint d, float acc, float total) {
    float g = p[push.qg_at + row * push.qg_row + ((head0 + h) * 2u + 1u) * DIM + d];
    y[push.y_at + (row * push.n_head + head0 + h) * DIM + d] = acc / total / (1.0 + exp(-g));
}

// Joins the parts of HEADS results in their order.
void join(uint first_partial, uint n_parts) {
    const uint stride = DIM + 2u;
    for (uint i = gl_LocalInvocationIndex; i < HEADS * DIM; i += 128u) {
        uint h = i / DIM, d = i % DIM;
        uint at = first_partial + h * push.n_parts * stride;
        float best = partials[at];
        for (uint c = 1u; c < n_parts; ++c) { best = max(best, partials[at + c * stride]); }
        float acc = 0.0, total = 0.0;
        for (uint c = 0u; c < n_parts; ++c) {
            float weight = exp(partials[at + c * stride] - best);
            total = fma(partials[at + c * stride + 1u], weight, total);
            acc = fma(partials[at + c * stride + 2u + d], weight, acc);
        }
        finish(h, d, acc, total);
    }
}

void main() {
    uint me = gl_LocalInvocationIndex;
    uint groups = push.n_head / HEADS;  // of query heads
    uint index = WORKGROUP_INDEX;
    uint group = index % groups, part = index / groups % push.n_parts;
    row = index / groups / push.n_parts;
    if (row >= push.n_rows) { return; }
    uint s = row / push.n_tokens;
    first_row = s * push.n_tokens;
    n_past = uint(step_values[push.step_at + s]);
    slot = uint(step_values[push.step_at + push.step_row + s]);
    uint position = n_past + row - first_row;
    uint span = CHUNK;  // keys in a part
    while (position / span >= push.most_parts) { span *= 2u; }
    uint n_parts = position / span + 1u;
    if (part >= n_parts || position >= push.n_ctx) { return; }  // the context checks this; never write past the cache
    head0 = group * HEADS;
    uint heads_per_kv = push.n_head / push.n_head_kv;
    kv_head = head0 / heads_per_kv;
    uint key_row = push.n_head_kv * DIM;
    uint k_at = push.k_cache_at + (slot * push.n_ctx * push.n_head_kv + kv_head) * DIM;
    uint v_at = push.v_cache_at + (slot * push.n_ctx * push.n_head_kv + kv_head) * DIM;
    uint fresh_v_at = push.v_at + first_row * push.v_row + kv_head * DIM;

    float best[HEADS], total[HEADS], acc[HEADS][OWN];
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        best[h] = -3.0e38;
        total[h] = 0.0;
        [[unroll]] for (uint j = 0u; j < OWN; ++j) { acc[h][j] = 0.0; }
    }
    uint end = min((part + 1u) * span, position + 1u);  // one past the part's last key
    for (uint key0 = part * span; key0 < end; key0 += CHUNK) {
        uint n_keys = min(CHUNK, end - key0);
        uint first_fresh = max(key0, n_past);  // keys from here on are the batch's own
        uint n_fresh = max(key0 + n_keys, first_fresh) - first_fresh;
        uint t_fresh = first_fresh - n_past;   // the row of the first one, if there is any
        bool has_query = key0 > part * span;
        uint key = key0 + min(me, n_keys - 1u);
        float score[HEADS];
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) { score[h] = 0.0; }
        uint done = 0u;  // of the batch's own keys
        do {
            uint n = min(FRESH, n_fresh - done);
            if (n > 0u || !has_query) { rope(has_query ? HEADS : 0u, HEADS + n, t_fresh + done); }
            has_query = true;
            bool cached = key < first_fresh;
            if (cached ? done == 0u : key - first_fresh - done < n) {
                uint from = cached ? (k_at + key * key_row) / 4u : (HEADS + key - first_fresh - done) * PITCH;
                for (uint i0 = 0u; i0 < DIM4; i0 += BLOCK) {
                    vec4 k[BLOCK];
                    if (cached) {
                        [[unroll]] for (uint i = 0u; i < BLOCK; ++i) { k[i] = k_cache[from + i0 + i]; }
                    } else {
                        [[unroll]] for (uint i = 0u; i < BLOCK; ++i) { k[i] = tile[from + i0 + i]; }
                    }
                    [[unroll]] for (uint i = 0u; i < BLOCK; ++i) {
                        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                            vec4 q = tile[h * PITCH + i0 + i];
                            score[h] = fma(k[i].x, q.x, fma(k[i].y, q.y, fma(k[i].z, q.z, fma(k[i].w, q.w, score[h]))));
                        }
                    }
                }
            }
            done += n;
            if (done < n_fresh) { barrier(); }  // the next keys take these ones' place
        } while (done < n_fresh);
        // The row's own key is its last one; one of the groups of its kv head writes it.
        if (key0 + n_keys > position && head0 % heads_per_kv == 0u) {
            uint from = (HEADS + (n_fresh - 1u) % FRESH) * PITCH, to = position * key_row;
            for (uint i = me; i < DIM4; i += 128u) { k_cache[(k_at + to) / 4u + i] = tile[from + i]; }
            for (uint d = me; d < DIM; d += 128u) {
                v_cache[v_at + to + d] = p[fresh_v_at + (row - first_row) * push.v_row + d];
            }
        }
        // The maximum and the sum of all heads together: one pair of barriers each.
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
            if (me >= n_keys) { score[h] = -3.0e38; }
            float team_best = team_max(score[h]);
            if (LANE == 0u) { team_partial[TEAM * HEADS + h] = team_best; }
        }
        barrier();
        float weight[HEADS], factor[HEADS];
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
            float now = best[h];
            for (uint i = 0u; i < TEAMS; ++i) { now = max(now, team_partial[i * HEADS + h]); }
            weight[h] = me < n_keys ? exp(score[h] - now) : 0.0;
            p_tile[h * CHUNK + me] = weight[h];
            factor[h] = exp(best[h] - now);  // of what came before
            best[h] = now;
            [[unroll]] for (uint j = 0u; j < OWN; ++j) { acc[h][j] *= factor[h]; }
        }
        barrier();
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
            float team_total = team_add(weight[h]);
            if (LANE == 0u) { team_partial[TEAM * HEADS + h] = team_total; }
        }
        barrier();
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
            float sum = 0.0;
            for (uint i = 0u; i < TEAMS; ++i) { sum += team_partial[i * HEADS + h]; }
            total[h] = fma(total[h], factor[h], sum);
        }
        for (uint n0 = 0u; n0 < n_keys; n0 += KEYS) {
            float v[KEYS][OWN];
            // Beyond the last key its v is loaded again: p is 0 there, while what the cache holds may be NaN.
            [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
                uint at = key0 + min(n0 + i, n_keys - 1u);
                [[unroll]] for (uint j = 0u; j < OWN; ++j) {
                    uint d = min(me + j * 128u, DIM - 1u);
                    if (at < first_fresh) {
                        v[i][j] = v_cache[v_at + at * key_row + d];
                    } else {
                        v[i][j] = p[fresh_v_at + (at - n_past) * push.v_row + d];
                    }
                }
            }
            [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
                [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                    float w = p_tile[h * CHUNK + n0 + i];
                    [[unroll]] for (uint j = 0u; j < OWN; ++j) { acc[h][j] = fma(w, v[i][j], acc[h][j]); }
                }
            }
        }
        barrier();  // all have read the sums and weights
    }

    uint first_partial = push.partials_at + (row * push.n_head + head0) * push.n_parts * (DIM + 2u);
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        [[unroll]] for (uint j = 0u; j < OWN; ++j) {
            uint d = me + j * 128u;
            if (d >= DIM) { continue; }
            if (n_parts == 1u) {
                finish(h, d, acc[h][j], total[h]);
            } else {
                uint at = first_partial + (h * push.n_parts + part) * (DIM + 2u);
                partials[at + 2u + d] = acc[h][j];
                if (d == 0u) { partials[at] = best[h]; partials[at + 1u] = total[h]; }
            }
        }
    }
    if (n_parts > 1u && last_of(n_parts, push.counters_at + row * groups + group)) { join(first_partial, n_parts); }
}
