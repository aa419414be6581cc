#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"
#include "turns.glsl"

// All of a decode step's attention between its two products. A workgroup takes one row, HEADS query heads of one kv head
// and one part of the keys:
//   loads    a chunk's keys and values in the cache, all under way before anything waits
//   rope     RMS norm and RoPE of its queries and of the batch's own keys that it sees, into shared memory. These rows
//            never come from the cache: the workgroup of a row's last part writes them there in this same dispatch.
//   scores   CHUNK keys at a time, a key by a team of 8 lanes, for all heads
//   values   an invocation owns four dims and every SIDES-th key, and sums p * v over these in order; then the sides are summed
//   join     the workgroup that finishes last joins the parts of a row and applies the output gate
// What is a chunk and a part follows from the row's position alone. Loops stay loops where they can: a step's kernels take
// turns, so their code is read in anew each time, and long code takes longer than a wait for memory (docs/performance.md).
layout(constant_id = 0) const uint HEADS = 1u;
layout(constant_id = 1) const uint DIM = 128u;       // head size
layout(constant_id = 2) const uint HALF_ROT = 16u;   // rotated pairs

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Projection { vec4 p_quads[]; };
layout(binding = 1) readonly buffer Norms { vec4 norm_quads[]; };
layout(binding = 2) readonly buffer Table { uint table[]; };
layout(binding = 3) readonly buffer Step { int step_values[]; };
layout(binding = 4) buffer KCache { vec4 k_cache[]; };
layout(binding = 5) buffer VCache { vec4 v_cache[]; };
layout(binding = 6) coherent buffer Partials { vec4 partials[]; };
layout(binding = 7) coherent buffer Counters { uint counters[]; };
layout(binding = 8) buffer Y { vec4 y_quads[]; };
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
const uint SIDES = 128u / DIM4 > 8u ? 8u : 128u / DIM4;  // keys whose values are summed side by side
const uint KEYS = (CHUNK + SIDES - 1u) / SIDES;  // of a chunk, on each side
const uint STRIDE = DIM4 + 1u;           // quads of a partial result: best score and total, then the values
#define NEVER -3.0e38  // a score below all others

const uint TILE = (HEADS + FRESH) * PITCH, SUMS = SIDES * HEADS * DIM4;
shared vec4 tile[TILE > SUMS ? TILE : SUMS];  // queries, then keys of the batch; at the end the sums of all sides
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
        x[i] = p_quads[at / 4u + lane_quad(i)];
        norm[i] = norm_quads[norm_at / 4u + lane_quad(i)];
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

// What this invocation owns of its side's values; beyond the last key of the cache, that one's again.
void load_values(uint v_at, uint key_row, uint key0, uint last, uint side, uint quad, out vec4 v[KEYS]) {
    [[unroll]] for (uint i = 0u; i < KEYS; ++i) { v[i] = v_cache[(v_at + min(key0 + i * SIDES + side, last) * key_row) / 4u + quad]; }
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

// The gate of quad d of a head.
vec4 gate(uint h, uint d) {
    return p_quads[(push.qg_at + row * push.qg_row + ((head0 + h) * 2u + 1u) * DIM) / 4u + d];
}

// The result of quad d of a head, times its gate.
void finish(uint h, uint d, vec4 acc, float total, vec4 g) {
    y_quads[(push.y_at + (row * push.n_head + head0 + h) * DIM) / 4u + d] = acc / total / (1.0 + exp(-g));
}

// Joins the parts of HEADS results in their order, UNDER_WAY at a time.
void join(uint first_partial, uint n_parts) {
    const uint UNDER_WAY = 16u;
    for (uint i = gl_LocalInvocationIndex; i < HEADS * DIM4; i += 128u) {
        uint h = i / DIM4, d = i % DIM4, first = first_partial + h * push.n_parts * STRIDE;
        vec4 g = gate(h, d), acc = vec4(0.0);
        float best = NEVER, total = 0.0;
        for (uint c0 = 0u; c0 < n_parts; c0 += UNDER_WAY) {
            vec2 head[UNDER_WAY];  // best score and total
            vec4 part[UNDER_WAY];
            [[unroll]] for (uint c = 0u; c < UNDER_WAY; ++c) {
                uint at = first + min(c0 + c, n_parts - 1u) * STRIDE;
                head[c] = partials[at].xy;
                part[c] = partials[at + 1u + d];
            }
            float before = best;
            [[unroll]] for (uint c = 0u; c < UNDER_WAY; ++c) { best = max(best, head[c].x); }
            float factor = exp(before - best);
            total *= factor;
            acc *= factor;
            [[unroll]] for (uint c = 0u; c < UNDER_WAY; ++c) {
                if (c0 + c < n_parts) {
                    float weight = exp(head[c].x - best);
                    total = fma(head[c].y, weight, total);
                    acc = fma(part[c], vec4(weight), acc);
                }
            }
        }
        finish(h, d, acc, total, g);
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

    uint side = me / DIM4, quad = me % DIM4;  // invocations beyond the last side compute what nobody reads
    float best[HEADS], total[HEADS], factor[HEADS];
    vec4 acc[HEADS];
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        best[h] = NEVER;
        total[h] = 0.0;
        acc[h] = vec4(0.0);
    }
    uint end = min((part + 1u) * span, position + 1u);  // one past the part's last key
    for (uint key0 = part * span; key0 < end; key0 += CHUNK) {
        uint n_keys = min(CHUNK, end - key0);
        uint first_fresh = max(key0, n_past);  // keys from here on are the batch's own
        uint n_fresh = max(key0 + n_keys, first_fresh) - first_fresh;
        uint t_fresh = first_fresh - n_past;   // the row of the first one, if there is any
        // Where there is no key in the cache, what is loaded is not used; it lies in the cache all the same.
        uint last_cached = max(min(first_fresh, key0 + n_keys), key0 + 1u) - 1u;
        vec4 k[PASSES][QUADS], v[KEYS];
        [[unroll]] for (uint pass = 0u; pass < PASSES; ++pass) {
            load_keys(k_at, key_row, min(key0 + pass * TEAMS + TEAM, last_cached), k[pass]);
        }
        load_values(v_at, key_row, key0, last_cached, side, quad, v);
        uint n = min(FRESH, n_fresh), done = 0u;
        bool has_query = key0 > part * span;
        for (;;) {
            if (n > 0u || !has_query) { rope(has_query ? HEADS : 0u, HEADS + n, t_fresh + done); }
            has_query = true;
            if (done == 0u) {
                [[unroll]] for (uint pass = 0u; pass < PASSES; ++pass) {
                    uint at = pass * TEAMS + TEAM;
                    if (key0 + at < first_fresh) { score(at, k[pass]); }
                }
            }
            if (TEAM < n) {  // the batch's own keys
                vec4 own[QUADS];
                [[unroll]] for (uint i = 0u; i < QUADS; ++i) { own[i] = tile[(HEADS + TEAM) * PITCH + lane_quad(i)]; }
                score(first_fresh - key0 + done + TEAM, own);
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
            for (uint i = me; i < DIM4; i += 128u) {
                v_cache[(v_at + to) / 4u + i] = p_quads[(fresh_v_at + (row - first_row) * push.v_row) / 4u + i];
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
            acc[h] *= factor[h];
            if (me / CHUNK == h % (128u / CHUNK)) {
                uint i = me % CHUNK;
                weights[(h * CHUNK + i) / 4u][i % 4u] = i < n_keys ? exp(scores[(h * CHUNK + i) / 4u][i % 4u] - now) : 0.0;
            }
        }
        barrier();
        // This side's keys in order: those in the cache, then the batch's own.
        uint n_cached = min(n_keys, first_fresh - key0);
        [[unroll]] for (uint i = 0u; i < KEYS; ++i) {
            uint at = i * SIDES + side;
            if (at < n_cached) {
                [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                    acc[h] = fma(vec4(weights[(h * CHUNK + at) / 4u][at % 4u]), v[i], acc[h]);
                }
            }
        }
        for (uint at = n_cached + (side + SIDES - n_cached % SIDES) % SIDES; at < n_keys; at += SIDES) {
            vec4 own = p_quads[(fresh_v_at + (key0 + at - n_past) * push.v_row) / 4u + quad];
            [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
                acc[h] = fma(vec4(weights[(h * CHUNK + at) / 4u][at % 4u]), own, acc[h]);
            }
        }
        [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
            vec4 sum = weights[h * CHUNK / 4u];
            [[unroll]] for (uint i = 1u; i < CHUNK / 4u; ++i) { sum += weights[h * CHUNK / 4u + i]; }
            total[h] = fma(total[h], factor[h], (sum.x + sum.y) + (sum.z + sum.w));
        }
    }

    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        if (side < SIDES) { tile[(side * HEADS + h) * DIM4 + quad] = acc[h]; }
    }
    barrier();
    uint first_partial = push.partials_at / 4u + (row * push.n_head + head0) * push.n_parts * STRIDE;
    for (uint i = me; i < HEADS * DIM4; i += 128u) {
        uint h = i / DIM4, d = i % DIM4;
        vec4 sum = tile[i];
        for (uint other = 1u; other < SIDES; ++other) { sum += tile[other * HEADS * DIM4 + i]; }
        float of_h = total[0], best_of_h = best[0];
        [[unroll]] for (uint j = 1u; j < HEADS; ++j) {
            if (h == j) { of_h = total[j]; best_of_h = best[j]; }
        }
        if (n_parts == 1u) {
            finish(h, d, sum, of_h, gate(h, d));
        } else {
            uint at = first_partial + (h * push.n_parts + part) * STRIDE;
            partials[at + 1u + d] = sum;
            if (d == 0u) { partials[at] = vec4(best_of_h, of_h, 0.0, 0.0); }
        }
    }
    if (n_parts > 1u && last_of(n_parts, push.counters_at + row * groups + group)) { join(first_partial, n_parts); }
}
