#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Product of a weight matrix with 1..16 rows of x. SPLIT teams share N_R weight rows: a lane takes every
// (8 * SPLIT)-th chunk of 16 columns (WIDE: every (8 * SPLIT)-th piece of 32), for all TOKENS rows of x; lanes are summed by
// team_add, teams in their order. That order is the same whatever TOKENS and N_R are, which is what makes decoding independent
// of the batch.
//
// The teams of a warp take the same columns of different weight rows, and with STRIDE 4 the invocations that want the same
// of x are neighbours: an NVIDIA GPU serves 16-byte loads 8 invocations at a time, and these then want 2 addresses, not 8.
//
// With NORM the norm costs no pass of its own: y = (W (x * norm)) / sqrt(mean(x^2) + eps), and the squares are summed
// beside the products. With GROUPS groups of columns of x are scaled likewise, their sums of squares being given.
layout(constant_id = 0) const uint TOKENS = 1u;
layout(constant_id = 1) const uint N_R = 1u;
layout(constant_id = 2) const uint SPLIT = 1u;
layout(constant_id = 3) const uint WIDE = 0u;
layout(constant_id = 4) const uint STRIDE = 1u;  // between the lanes of a team
layout(constant_id = 5) const uint PARTS = 1u;   // sums of squares of a group of columns
layout(constant_id = 6) const uint ORDER = 0u;   // of the bytes that are made of the result

#define LANE_STRIDE STRIDE
#include "lanes.glsl"

#define SLOTS (TEAMS / SPLIT)
const uint RESULTS = (SLOTS * N_R * TOKENS + LOCAL_SIZE - 1u) / LOCAL_SIZE;  // of an invocation

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { vec4 x_quads[]; };
#ifdef EMIT
layout(binding = 2) coherent buffer Y { float y[]; };
#else
layout(binding = 2) buffer Y { float y[]; };
#endif
#if defined(NORM)
layout(binding = 3) readonly buffer Norm { vec4 norm_quads[]; };
#elif defined(GROUPS)
layout(binding = 3) readonly buffer Squares { float group_squares[]; };
#endif
#ifdef RESIDUAL
#if defined(NORM) || defined(GROUPS)
layout(binding = 4) readonly buffer Residual { float residual[]; };
#else
layout(binding = 3) readonly buffer Residual { float residual[]; };
#endif
#endif
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out;
    uint x_at; uint x_row; uint y_at; uint y_row;
    uint norm_at; float eps; uint residual_at; uint residual_row; uint group_size;
#ifdef EMIT
    uint bytes_at; uint bytes_row; uint counters_at; uint next_norm_at;
#endif
} push;

#include "weights.glsl"
#ifdef EMIT  // only with RESIDUAL
#ifdef GROUPS
#define EMIT_AT 5
#else
#define EMIT_AT 4
#endif
#define N_COLUMNS (SLOTS * N_R)
#include "emit.glsl"
#endif

shared float team_sums[TEAMS * N_R * TOKENS];
shared float team_squares[TEAMS * TOKENS];

#ifdef GROUPS
float group_scale(uint t, uint column) {
    uint n_groups = push.n_in / push.group_size;
    uint at = push.norm_at + (t * n_groups + column / push.group_size) * PARTS;
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < PARTS; ++i) { sum += group_squares[at + i]; }
    precise float mean = sum / float(push.group_size) + push.eps;
    return inversesqrt(mean);
}
#endif

// Adds what 16 columns, chunk c of each row, give to the sums.
void add_chunk(Chunk w[N_R], uint c, inout float sums[N_R][TOKENS], inout float squares[TOKENS]) {
    float part[N_R][TOKENS];
    float x_sum[TOKENS];
#ifdef GROUPS
    float scale[TOKENS];  // first, so that they are on their way together with all else
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) { scale[t] = group_scale(t, c * 16u); }
#endif
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        vec4 q[N_R];
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { q[r] = unpack(w[r], i); }
#ifdef NORM
        vec4 norm = norm_quads[push.norm_at / 4u + c * 4u + i];
#else
        const vec4 norm = vec4(1.0);
#endif
        [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
            vec4 v = x_quads[(push.x_at + t * push.x_row) / 4u + c * 4u + i];
#ifdef HAS_OFFSET
            // Not the sum of x * norm: that may be contracted by a compiler, in one variant and not in another.
            x_sum[t] = fma(v.x, norm.x, fma(v.y, norm.y, fma(v.z, norm.z, fma(v.w, norm.w, i == 0u ? 0.0 : x_sum[t]))));
#endif
#ifdef NORM
            squares[t] = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, fma(v.w, v.w, squares[t]))));
            v *= norm;
#endif
            [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                float before = i == 0u ? 0.0 : part[r][t];
                part[r][t] = fma(q[r].x, v.x, fma(q[r].y, v.y, fma(q[r].z, v.z, fma(q[r].w, v.w, before))));
            }
        }
    }
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
#ifdef GROUPS
            precise float factor = w[r].factor * scale[t];
#else
            float factor = w[r].factor;
#endif
#ifdef HAS_OFFSET
            // Never a sum of two products: which of the two a compiler contracts is its choice.
#ifdef GROUPS
            precise float offset = w[r].offset * scale[t];
#else
            float offset = w[r].offset;
#endif
            sums[r][t] = fma(-offset, x_sum[t], sums[r][t]);
#endif
            sums[r][t] = fma(part[r][t], factor, sums[r][t]);
        }
    }
}

// The value of weight row `row` of this workgroup's rows, for row t of x, before the epilogue.
float joined(uint row, uint t) {
    uint slot = row / N_R, r = row % N_R;
    float sum = 0.0, squares = 0.0;
    [[unroll]] for (uint i = 0u; i < SPLIT; ++i) {
        sum += team_sums[((slot + i * SLOTS) * N_R + r) * TOKENS + t];
        squares += team_squares[(slot + i * SLOTS) * TOKENS + t];
    }
#ifdef NORM
    precise float mean = squares / float(push.n_in) + push.eps;
    sum *= inversesqrt(mean);
#endif
    return sum;
}

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    const uint rows = SLOTS * N_R;  // of this workgroup
    uint base = WORKGROUP_INDEX * rows;
    if (base >= push.n_out) { return; }
    // Rows past the end of the matrix are its last row again, whose result is not used.
    uint first = base + TEAM % SLOTS * N_R, last = push.n_out - 1u;
#ifdef RESIDUAL
    float added[RESULTS];  // asked for now, so that nothing waits for it at the end
    [[unroll]] for (uint k = 0u; k < RESULTS; ++k) {
        uint i = min(gl_LocalInvocationIndex + k * LOCAL_SIZE, rows * TOKENS - 1u);
        added[k] = residual[push.residual_at + i / rows * push.residual_row + min(base + i % rows, last)];
    }
#endif
    float sums[N_R][TOKENS];
    float squares[TOKENS];
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        squares[t] = 0.0;
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r][t] = 0.0; }
    }
    uint n_chunks = push.n_in / 16u;
    const uint mine = TEAM / SLOTS * LANES + LANE, stride = LANES * SPLIT;
    if (WIDE == 0u) {
        for (uint chunk = mine; chunk < n_chunks; chunk += stride) {
            Chunk w[N_R];
            [[unroll]] for (uint r = 0u; r < N_R; ++r) { w[r] = load_chunk(planes, push.n_in, min(first + r, last), chunk); }
            add_chunk(w, chunk, sums, squares);
        }
    } else {  // fewer loads and scales for as many columns, more registers
        for (uint piece = mine; piece < n_chunks / HALVES; piece += stride) {
            Chunk w[N_R][HALVES];
            [[unroll]] for (uint r = 0u; r < N_R; ++r) { load_piece(planes, push.n_in, min(first + r, last), piece, w[r]); }
            [[unroll]] for (uint h = 0u; h < HALVES; ++h) {
                Chunk half_of[N_R];
                [[unroll]] for (uint r = 0u; r < N_R; ++r) { half_of[r] = w[r][h]; }
                add_chunk(half_of, piece * HALVES + h, sums, squares);
            }
        }
    }
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
#ifdef NORM
        float square = team_add(squares[t]);
        if (LANE == 0u) { team_squares[TEAM * TOKENS + t] = square; }
#endif
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            float value = team_add(sums[r][t]);
            if (LANE == 0u) { team_sums[(TEAM * N_R + r) * TOKENS + t] = value; }
        }
    }
    barrier();
#ifdef SWIGLU
    for (uint i = gl_LocalInvocationIndex; i < rows / 2u * TOKENS; i += LOCAL_SIZE) {
        uint pair = i % (rows / 2u), t = i / (rows / 2u);
        float gate = joined(2u * pair, t), up = joined(2u * pair + 1u, t);
        if (base + 2u * pair < push.n_out) { y[push.y_at + t * push.y_row + base / 2u + pair] = gate / (1.0 + exp(-gate)) * up; }
    }
#else
    [[unroll]] for (uint k = 0u; k < RESULTS; ++k) {
        uint i = gl_LocalInvocationIndex + k * LOCAL_SIZE, row = i % rows, t = i / rows;
        if (i < rows * TOKENS && base + row < push.n_out) {
            precise float value = joined(row, t);  // scaling and adding are never contracted to a fma
#ifdef RESIDUAL
            value += added[k];
#endif
            y[push.y_at + t * push.y_row + base + row] = value;
#ifdef EMIT
            made(value, row, t);
#endif
        }
    }
#endif
#ifdef EMIT
    emit(base, push.n_out);
#endif
}
