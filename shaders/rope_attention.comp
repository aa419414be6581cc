#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"
#include "turns.glsl"

// All of a decode step's attention between its two products. A workgroup takes one row, HEADS query heads of one kv head
// and one part of the keys:
//   loads    the first keys and values of the cache, under way before anything waits
//   rope     RMS norm and RoPE of its queries and of the batch's own keys that it sees, into shared memory. These rows
//            never come from the cache: the workgroup of a row's last part writes them there in this same dispatch.
//   scores   CHUNK keys at a time, a key by a team of 8 lanes, for all heads
//   values   each invocation owns some dims and sums p * v over the keys in order
//   join     the workgroup that finishes last joins the parts of a row and applies the output gate
// What is a chunk and a part follows from the row's position alone. Loops stay loops where they can: a step's kernels take
// turns, so their code is read in anew each time, and long code takes longer than a wait for memory (docs/performance.md).
layout(constant_id = 0) const uint HEADS = 1u;
layout(constant_id = 1) const uint DIM = 128u;       // head size
layout(constant_id = 2) const uint HALF_ROT = 16u;   // rotated pairs

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

const uint CHUNK = 32u;
const uint PASSES = CHUNK / TEAMS;       // of the teams over a chunk's keys
const uint FRESH = 8u;                   // keys of the batch that shared memory holds at a time
const uint DIM4 = DIM / 4u;
const uint PITCH = DIM4 + 1u;            // quads from vector to vector: neighbours lie in different banks
const uint QUADS = (DIM4 + LANES - 1u) / LANES;  // of a vector that a lane has; the last one may be none
const uint OWN = (DIM + 127u) / 128u;    // dims of a result that one invocation owns
const uint KEYS = 8u;                    // values under way at a time
#define NEVER -3.0e38  // a score below all others

shared vec4 tile[(HEADS + FRESH) * PITCH];   // queries, then keys of the batch
shared float lane_scores[HEADS * CHUNK * LANES];
shared vec4 scores[HEADS * CHUNK / 4u];
shared vec4 weights[HEADS * CHUNK / 4u];

uint row, head0, kv_head, first_row, n_past, slot;

// Word of vector i of the tile in the projection; keys are those of the batch's rows from t0 on.
uint source(uint i, uint t0) {
    return i < HEADS ? push.qg_at + row * push.qg_row + (head0 + i) * 2u * DIM
                     : push.k_at + (first_row + t0 + i - HEADS) * push.k_row + kv_head * DIM;
}

// Written so that they fold away where all lanes have as many quads.
uint lane_quad(uint i) { return DIM4 % LANES == 0u ? i * LANES + LANE : min(i * LANES + LANE, DIM4 - 1u); }

bool has_quad(uint i) { return DIM4 % LANES == 0u || i * LANES + LANE < DIM4; }

// Norm and RoPE of vectors [from, to) of the tile, at most one a team. Ends with a barrier.
void rope(uint from, uint to, uint t0) {
    uint vector = min(from + TEAM, to - 1u), at = source(vector, t0);
    bool is_q = vector < HEADS;
    uint norm_at = is_q ? push.q_norm_at : push.k_norm_at;
    vec4 x[QUADS], norm[QUADS];
    [[unroll]] for (uint i = 0u; i < QUADS; ++i) {
        uint d = lane_quad(i) * 4u;
        x[i] = vec4(p[at + d], p[at + d + 1u], p[at + d + 2u], p[at + d + 3u]);
        norm[i] = vec4(norms[norm_at + d], norms[norm_at + d + 1u], norms[norm_at + d + 2u], norms[norm_at + d + 3u]);
    }
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < QUADS; ++i) {
        if (has_quad(i)) {
            sum = fma(x[i].x, x[i].x, fma(x[i].y, x[i].y, fma(x[i].z, x[i].z, fma(x[i].w, x[i].w, sum))));
        }
    }
    // Queries are scaled here: after the sums, one variant could contract scale and maximum into an fma.
    precise float factor = inversesqrt(team_add(sum) / float(DIM) + push.eps) * (is_q ? push.scale : 1.0);
    if (from + TEAM < to) {
        [[unroll]] for (uint i = 0u; i < QUADS; ++i) {
            precise vec4 normed = x[i] * factor * norm[i];
            if (has_quad(i)) { tile[vector * PITCH + lane_quad(i)] = normed; }
        }
    }
    barrier();
    for (uint n = gl_LocalInvocationIndex; n < (to - from) * HALF_ROT; n += 128u) {
        uint v = from + n / HALF_ROT, a = n % HALF_ROT, b = a + HALF_ROT, base = v * PITCH;
        uint position = n_past + (v < HEADS ? row - first_row : t0 + v - HEADS);
        vec2 cs = cos_sin_turns(turns_at(position, table[push.table_at + 2u * a], table[push.table_at + 2u * a + 1u]));
        float x0 = tile[base + a / 4u][a % 4u], x1 = tile[base + b / 4u][b % 4u];
        precise float y0 = x1 * cs.y, y1 = x1 * cs.x;
        tile[base + a / 4u][a % 4u] = fma(x0, cs.x, -y0);
        tile[base + b / 4u][b % 4u] = fma(x0, cs.y, y1);
    }
    barrier();
}

void load_keys(uint k_at, uint key_row, uint key, out vec4 k[QUADS]) {
    [[unroll]] for (uint i = 0u; i < QUADS; ++i) { k[i] = k_cache[(k_at + key * key_row) / 4u + lane_quad(i)]; }
}

// What this invocation owns of KEYS values; beyond the last key of the cache, that one's again.
void load_values(uint v_at, uint key_row, uint key, uint last, out float v[KEYS][OWN]) {
    [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
        uint from = v_at + min(key + i, last) * key_row;
        [[unroll]] for (uint j = 0u; j < OWN; ++j) { v[i][j] = v_cache[from + min(gl_LocalInvocationIndex + j * 128u, DIM - 1u)]; }
    }
}

// This lane's part of the scores of key number `at` of the chunk.
void score(uint at, vec4 k[QUADS]) {
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        float sum = 0.0;
        [[unroll]] for (uint i = 0u; i < QUADS; ++i) {
            vec4 q = tile[h * PITCH + lane_quad(i)];
            if (has_quad(i)) { sum = fma(k[i].x, q.x, fma(k[i].y, q.y, fma(k[i].z, q.z, fma(k[i].w, q.w, sum)))); }
        }
        lane_scores[(h * CHUNK + at) * LANES + LANE] = sum;
    }
}

void finish(uint h, uint d, float acc, float total) {
    float g = p[push.qg_at + row * push.qg_row + ((head0 + h) * 2u + 1u) * DIM + d];
    y[push.y_at + (row * push.n_head + head0 + h) * DIM + d] = acc / total / (1.0 + exp(-g));
}

// Joins the parts of HEADS results in their order.
void join(uint first_partial, uint n_parts) {
    const uint stride = DIM + 2u, UNDER_WAY = 8u;
    uint me = gl_LocalInvocationIndex, totals = HEADS * n_parts;  // the two lie in lane_scores, whose scores are done with
    for (uint i = me; i < HEADS * n_parts; i += 128u) {
        uint at = first_partial + (i / n_parts * push.n_parts + i % n_parts) * stride;
        lane_scores[i] = partials[at];
        lane_scores[totals + i] = partials[at + 1u];
    }
    barrier();
    for (uint i = me; i < HEADS * DIM; i += 128u) {
        uint h = i / DIM, d = i % DIM, first = h * n_parts;
        uint at = first_partial + h * push.n_parts * stride + 2u + d;
        float best = NEVER;
        for (uint c = 0u; c < n_parts; ++c) { best = max(best, lane_scores[first + c]); }
        float acc = 0.0, total = 0.0;
        for (uint c0 = 0u; c0 < n_parts; c0 += UNDER_WAY) {
            float part[UNDER_WAY];
            [[unroll]] for (uint c = 0u; c < UNDER_WAY; ++c) { part[c] = partials[at + min(c0 + c, n_parts - 1u) * stride]; }
            [[unroll]] for (uint c = 0u; c < UNDER_WAY; ++c) {
                if (c0 + c < n_parts) {
                    float weight = exp(lane_scores[first + c0 + c] - best);
                    total = fma(lane_scores[totals + first + c0 + c], weight, total);
                    acc = fma(part[c], weight, acc);
                }
            }
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

    float best[HEADS], total[HEADS], factor[HEADS], acc[HEADS][OWN];
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        best[h] = NEVER;
        total[h] = 0.0;
        [[unroll]] for (uint j = 0u; j < OWN; ++j) { acc[h][j] = 0.0; }
    }
    uint end = min((part + 1u) * span, position + 1u);  // one past the part's last key
    for (uint key0 = part * span; key0 < end; key0 += CHUNK) {
        uint n_keys = min(CHUNK, end - key0);
        uint first_fresh = max(key0, n_past);  // keys from here on are the batch's own
        uint n_fresh = max(key0 + n_keys, first_fresh) - first_fresh;
        uint t_fresh = first_fresh - n_past;   // the row of the first one, if there is any
        // Where there is no key in the cache, what is loaded is not used; it lies in the cache all the same.
        uint last_cached = max(min(first_fresh, key0 + n_keys), key0 + 1u) - 1u;
        vec4 k[QUADS];
        float v[KEYS][OWN];
        load_keys(k_at, key_row, min(key0 + TEAM, last_cached), k);
        load_values(v_at, key_row, key0, last_cached, v);
        uint n = min(FRESH, n_fresh), done = 0u;
        bool has_query = key0 > part * span;
        for (;;) {
            if (n > 0u || !has_query) { rope(has_query ? HEADS : 0u, HEADS + n, t_fresh + done); }
            has_query = true;
            uint passes = done == 0u ? PASSES + 1u : 1u;  // the last one over the batch's own keys
            for (uint pass = PASSES + 1u - passes; pass <= PASSES; ++pass) {
                uint at = pass * TEAMS + TEAM;
                bool cached = pass < PASSES, wanted = cached ? key0 + at < first_fresh : TEAM < n;
                if (!cached) {
                    at = first_fresh - key0 + done + TEAM;
                    [[unroll]] for (uint i = 0u; i < QUADS; ++i) { k[i] = tile[(HEADS + TEAM % FRESH) * PITCH + lane_quad(i)]; }
                }
                if (wanted) { score(at, k); }
                if (pass + 1u < PASSES) { load_keys(k_at, key_row, min(key0 + at + TEAMS, last_cached), k); }
            }
            done += n;
            if (done >= n_fresh) { break; }
            n = min(FRESH, n_fresh - done);
            barrier();  // these keys take the place of the ones before
        }
        // The row's own key is its last one; one of the groups of its kv head writes it.
        if (key0 + n_keys > position && head0 % heads_per_kv == 0u) {
            uint from = (HEADS + (n_fresh - 1u) % FRESH) * PITCH, to = position * key_row;
            for (uint i = me; i < DIM4; i += 128u) { k_cache[(k_at + to) / 4u + i] = tile[from + i]; }
            for (uint d = me; d < DIM; d += 128u) {
                v_cache[v_at + to + d] = p[fresh_v_at + (row - first_row) * push.v_row + d];
            }
        }
        barrier();
        for (uint i = me; i < HEADS * CHUNK; i += 128u) {
            uint at = i * LANES;
            float a = lane_scores[at] + lane_scores[at + 1u], b = lane_scores[at + 2u] + lane_scores[at + 3u];
            float c = lane_scores[at + 4u] + lane_scores[at + 5u], d = lane_scores[at + 6u] + lane_scores[at + 7u];
            scores[i / 4u][i % 4u] = i % CHUNK < n_keys ? (a + b) + (c + d) : NEVER;
        }
        barrier();
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
            vec4 most = scores[h * CHUNK / 4u];
            [[unroll]] for (uint i = 1u; i < CHUNK / 4u; ++i) { most = max(most, scores[h * CHUNK / 4u + i]); }
            float now = max(max(best[h], max(most.x, most.y)), max(most.z, most.w));
            factor[h] = exp(best[h] - now);  // of what came before
            best[h] = now;
            [[unroll]] for (uint j = 0u; j < OWN; ++j) { acc[h][j] *= factor[h]; }
            if (me / CHUNK == h % (128u / CHUNK)) {
                uint i = me % CHUNK;
                weights[(h * CHUNK + i) / 4u][i % 4u] = i < n_keys ? exp(scores[(h * CHUNK + i) / 4u][i % 4u] - now) : 0.0;
            }
        }
        barrier();
        // The cache's values, KEYS at a time with the next ones under way; then the batch's own.
        uint n_cached = min(n_keys, first_fresh - key0);
        for (uint n0 = 0u; n0 < n_cached; n0 += KEYS) {
            float now[KEYS][OWN];
            [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
                [[unroll]] for (uint j = 0u; j < OWN; ++j) { now[i][j] = v[i][j]; }
            }
            load_values(v_at, key_row, key0 + n0 + KEYS, last_cached, v);
            [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
                [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                    uint at = h * CHUNK + n0 + i;
                    float w = n0 + i < n_cached ? weights[at / 4u][at % 4u] : 0.0;
                    [[unroll]] for (uint j = 0u; j < OWN; ++j) { acc[h][j] = fma(w, now[i][j], acc[h][j]); }
                }
            }
        }
        for (uint i = n_cached; i < n_keys; ++i) {
            uint from = fresh_v_at + (key0 + i - n_past) * push.v_row;
            [[unroll]] for (uint j = 0u; j < OWN; ++j) {
                float own = p[from + min(me + j * 128u, DIM - 1u)];
                [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                    acc[h][j] = fma(weights[(h * CHUNK + i) / 4u][i % 4u], own, acc[h][j]);
                }
            }
        }
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
            vec4 sum = weights[h * CHUNK / 4u];
            [[unroll]] for (uint i = 1u; i < CHUNK / 4u; ++i) { sum += weights[h * CHUNK / 4u + i]; }
            total[h] = fma(total[h], factor[h], (sum.x + sum.y) + (sum.z + sum.w));
        }
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
