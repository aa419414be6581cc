#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "common.glsl"

// Product of a weight matrix with 1..16 rows of x, by dot products of bytes: what linear_rows does in floats, in a quarter of
// the instructions. x has been made 16-bit integers with a scale for each 16 columns by row_bytes.comp, as two planes of
// signed bytes. Sums of 16 columns are exact up to one rounding.
//
// SPLIT teams share N_R weight rows: a lane takes every (8 * SPLIT)-th chunk of 16 columns (WIDE: piece of 32), for all TOKENS
// rows of x; lanes are summed by team_add, teams in their order. That order is the same whatever TOKENS and N_R are, which
// makes decoding independent of the batch.
layout(constant_id = 0) const uint TOKENS = 1u;
layout(constant_id = 1) const uint N_R = 1u;
layout(constant_id = 2) const uint SPLIT = 1u;
layout(constant_id = 3) const uint WIDE = 0u;
layout(constant_id = 4) const uint STRIDE = 1u;  // between the lanes of a team
layout(constant_id = 5) const uint SQUARES = 1u; // sums of squares of x that an invocation takes
layout(constant_id = 6) const uint ORDER = 0u;   // of the bytes that are made of the result

#define LANE_STRIDE STRIDE
#include "lanes.glsl"

#define SLOTS (TEAMS / SPLIT)
const uint RESULTS = (SLOTS * N_R * TOKENS + LOCAL_SIZE - 1u) / LOCAL_SIZE;  // of an invocation
const uint PIECE = WIDE == 0u ? 1u : 2u;  // chunks

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { uvec4 x_planes[]; };
layout(binding = 1) readonly buffer XScales { vec2 x_scales[]; };
layout(binding = 1) readonly buffer XSquares { float x_squares[]; };
#ifdef EMIT
layout(binding = 2) coherent buffer Y { float y[]; };
#else
layout(binding = 2) buffer Y { float y[]; };
#endif
#ifdef RESIDUAL
layout(binding = 3) readonly buffer Residual { float residual[]; };
#endif
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out;
    uint x_at; uint x_row; uint y_at; uint y_row;
    float eps; uint residual_at; uint residual_row;
#ifdef EMIT
    uint bytes_at; uint bytes_row; uint counters_at; uint next_norm_at;
#endif
} push;

#include "weights.glsl"
#include "dots.glsl"
#ifdef EMIT
#ifdef RESIDUAL
#define EMIT_AT 4
#else
#define EMIT_AT 3
#endif
#ifdef SWIGLU
#define N_COLUMNS (SLOTS * N_R / 2u)
#else
#define N_COLUMNS (SLOTS * N_R)
#endif
#include "emit.glsl"
#endif

shared float team_sums[TEAMS * N_R * TOKENS];
#ifdef NORM
shared float team_squares[TEAMS * TOKENS];
#endif

const float ONE = 12582912.0;  // 1.5 * 2^23: a float whose last bit is worth 1
const int ONE_BITS = 0x4B400000;

// Adds what 16 columns, chunk `c` of each row, give to the sums.
void add_chunk(Chunk w[N_R], uint c, inout float sums[N_R][TOKENS]) {
    uvec4 words[N_R];
    [[unroll]] for (uint r = 0u; r < N_R; ++r) { words[r] = dot_words(w[r]); }
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        uint row = push.x_at + t * push.x_row, n_chunks = push.n_in / 16u;
        uvec4 low = x_planes[row / 4u + c], high = x_planes[row / 4u + n_chunks + c];
        vec2 x = x_scales[row / 2u + 4u * n_chunks + c];
#ifdef HAS_OFFSET
        precise float x_sum = x.x * x.y;
#endif
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            // Integers in the last bits of a float, so that none has to be converted.
            int l = ONE_BITS, h = ONE_BITS;
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                l += dot4(words[r][i], low[i]);
                h += dot4(words[r][i], high[i]);
            }
            float part = fma(intBitsToFloat(h) - ONE, 256.0, intBitsToFloat(l) - ONE);
            part = fma(-LESS, x.y, part);
            precise float factor = w[r].factor * x.x;
            sums[r][t] = fma(part, factor, sums[r][t]);
#ifdef HAS_OFFSET
            sums[r][t] = fma(-w[r].offset, x_sum, sums[r][t]);
#endif
        }
    }
}

// The value of weight row `row` of this workgroup's rows, for row t of x, before the epilogue.
float joined(uint row, uint t) {
    uint slot = row / N_R, r = row % N_R;
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < SPLIT; ++i) { sum += team_sums[((slot + i * SLOTS) * N_R + r) * TOKENS + t]; }
#ifdef NORM
    float squares = 0.0;
    [[unroll]] for (uint i = 0u; i < TEAMS; ++i) { squares += team_squares[i * TOKENS + t]; }
    precise float mean = squares / float(push.n_in) + push.eps;
    sum *= inversesqrt(mean);
#endif
    return sum;
}

void load(uvec3 planes, uint first, uint piece, out Chunk w[N_R][2]) {
    [[unroll]] for (uint r = 0u; r < N_R; ++r) {
        uint row = min(first + r, push.n_out - 1u);
        if (WIDE == 0u) {
            w[r][0] = load_chunk(planes, push.n_in, row, piece);
        } else {
            load_piece(planes, push.n_in, row, piece, w[r]);
        }
    }
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
#ifdef NORM
    float squares[TOKENS][SQUARES];  // on their way while the products are made
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        [[unroll]] for (uint k = 0u; k < SQUARES; ++k) {
            uint i = gl_LocalInvocationIndex + k * LOCAL_SIZE, at = push.x_at + t * push.x_row + push.n_in / 8u * 5u;
            squares[t][k] = i < push.n_in / 16u ? x_squares[at + i] : 0.0;
        }
    }
#endif
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r][t] = 0.0; }
    }
    const uint mine = TEAM / SLOTS * LANES + LANE, stride = LANES * SPLIT;
    for (uint piece = mine; piece < push.n_in / 16u / PIECE; piece += stride) {
        Chunk w[N_R][2];
        load(planes, first, piece, w);
        [[unroll]] for (uint h = 0u; h < PIECE; ++h) {
            Chunk of[N_R];
            [[unroll]] for (uint r = 0u; r < N_R; ++r) { of[r] = w[r][h]; }
            add_chunk(of, piece * PIECE + h, sums);
        }
    }
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
#ifdef NORM
        float square = squares[t][0];
        [[unroll]] for (uint k = 1u; k < SQUARES; ++k) { square += squares[t][k]; }
        square = team_add(square);
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
        float value = gate / (1.0 + exp(-gate)) * up;
        if (base + 2u * pair < push.n_out) { y[push.y_at + t * push.y_row + base / 2u + pair] = value; }
#ifdef EMIT
        made(value, pair, t);
#endif
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
#ifdef SWIGLU
    emit(base / 2u, push.n_out / 2u);
#else
    emit(base, push.n_out);
#endif
#endif
}
