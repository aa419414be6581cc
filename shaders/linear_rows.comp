#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Product of a weight matrix with 1..16 rows of x. SPLIT teams share N_R weight rows: a lane takes every
// (8 * SPLIT)-th piece of the columns, for all TOKENS rows of x; lanes are summed by team_add, teams in their order. That
// order is the same whatever TOKENS, N_R and TILE are, which is what makes decoding independent of the batch.
//
// With NORM the norm costs no pass of its own: y = (W (x * norm)) / sqrt(mean(x^2) + eps). With GROUPS groups of
// columns of x are scaled, their sums of squares being given. With TILE the rows of x are prepared once for the whole
// workgroup, in shared memory, TILE columns at a time; without it every lane reads and prepares what it needs.
layout(constant_id = 0) const uint TOKENS = 1u;
layout(constant_id = 1) const uint N_R = 1u;
layout(constant_id = 2) const uint SPLIT = 1u;
layout(constant_id = 3) const uint AHEAD = 1u;  // pieces whose loads are under way at a time
layout(constant_id = 4) const uint TILE = 0u;   // 0, or a multiple of the columns that the teams of a row take at a time

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { vec4 x_quads[]; };
layout(binding = 2) buffer Y { float y[]; };
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
    uint norm_at; float eps; uint residual_at; uint residual_row; uint group_size; uint group_parts;
} push;

#include "weights.glsl"

const uint QUADS = HALVES * 4u;                 // of a piece
const uint STRIDE = LANES * SPLIT;              // pieces that the teams of a row take at a time
const uint PIECE = QUADS * 4u;                  // columns
const uint PITCH = TILE / PIECE + 1u;           // quads from one quad of a piece to the next: lanes read neighbours
const uint ROWS = TEAMS / SPLIT * N_R;          // weight rows of a workgroup

shared float team_sums[TEAMS * N_R * TOKENS];
shared float squares_sum[TOKENS];
shared vec4 x_tile[TILE == 0u ? 1u : TOKENS * QUADS * PITCH];

// What row t of x is scaled by at a column, and the 15 after it.
float group_scale(uint t, uint column) {
#ifdef GROUPS
    uint n_groups = push.n_in / push.group_size;
    uint at = push.norm_at + (t * n_groups + column / push.group_size) * push.group_parts;
    float sum = 0.0;
    for (uint i = 0u; i < push.group_parts; ++i) { sum += group_squares[at + i]; }
    precise float mean = sum / float(push.group_size) + push.eps;
    return inversesqrt(mean);
#else
    return 1.0;
#endif
}

vec4 raw_x(uint t, uint quad) { return x_quads[(push.x_at + t * push.x_row) / 4u + quad]; }

vec4 prepared(vec4 v, uint quad, float scale) {
#if defined(NORM)
    precise vec4 scaled = v * norm_quads[push.norm_at / 4u + quad];
    return scaled;
#elif defined(GROUPS)
    precise vec4 scaled = v * scale;
    return scaled;
#else
    return v;
#endif
}

// Quad i of piece p of row t of x; scale is that of its group.
vec4 x_at(uint t, uint p, uint i, float scale) {
    if (TILE != 0u) { return x_tile[(t * QUADS + i) * PITCH + p]; }
    uint quad = p * QUADS + i;
    return prepared(raw_x(t, quad), quad, scale);
}

// The sum over the lanes of weight row `row` of this workgroup's rows, for row t of x.
float joined(uint row, uint t) {
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < SPLIT; ++i) {
        sum += team_sums[((i * (TEAMS / SPLIT) + row / N_R) * N_R + row % N_R) * TOKENS + t];
    }
#ifdef NORM
    precise float mean = squares_sum[t] / float(push.n_in) + push.eps;
    sum *= inversesqrt(mean);
#endif
    return sum;
}

// The pieces p, p + STRIDE, ... of the tile that starts at piece_0, of N_R weight rows. Past the end of a row or of the
// matrix something is loaded again and not used.
void fetch(out Chunk w[AHEAD][N_R][HALVES], uvec3 planes, uint first, uint piece_0, uint p, uint pieces) {
    [[unroll]] for (uint a = 0u; a < AHEAD; ++a) {
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            uint piece = piece_0 + min(p + a * STRIDE, pieces - 1u);
            load_piece(planes, push.n_in, min(first + r, push.n_out - 1u), piece, w[a][r]);
        }
    }
}

// Sums the squares of x (with NORM) and fills x_tile (with TILE). A tile is a multiple of LOCAL_SIZE quads or the whole
// row, so that an invocation meets its quads in the same order with and without TILE.
void prepare_tile(uint start, uint columns, inout float squares[TOKENS]) {
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        for (uint q = gl_LocalInvocationIndex; q < columns / 4u; q += LOCAL_SIZE) {
            vec4 v = raw_x(t, start / 4u + q);
#ifdef NORM
            squares[t] = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, fma(v.w, v.w, squares[t]))));
#endif
            if (TILE != 0u) {
                float scale = group_scale(t, start + q * 4u);
                x_tile[(t * QUADS + q % QUADS) * PITCH + q / QUADS] = prepared(v, start / 4u + q, scale);
            }
        }
    }
}

// Adds the products of piece p of the tile to the sums.
void multiply(Chunk w[N_R][HALVES], uint p, inout float sums[N_R][TOKENS]) {
    [[unroll]] for (uint h = 0u; h < HALVES; ++h) {
        float part[N_R][TOKENS];
        precise float x_sum[TOKENS];  // or its sums are contracted with the products of the norm, where x is not shared
        float scale[TOKENS];
        [[unroll]] for (uint t = 0u; t < TOKENS; ++t) { scale[t] = TILE == 0u ? group_scale(t, p * PIECE + h * 16u) : 1.0; }
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            vec4 q[N_R];
            [[unroll]] for (uint r = 0u; r < N_R; ++r) { q[r] = unpack(w[r][h], i); }
            [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
                vec4 v = x_at(t, p, h * 4u + i, scale[t]);
#ifdef HAS_OFFSET
                x_sum[t] = (i == 0u ? 0.0 : x_sum[t]) + ((v.x + v.y) + (v.z + v.w));
#endif
                [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                    float sum = i == 0u ? 0.0 : part[r][t];
                    part[r][t] = fma(q[r].x, v.x, fma(q[r].y, v.y, fma(q[r].z, v.z, fma(q[r].w, v.w, sum))));
                }
            }
        }
        [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
            [[unroll]] for (uint r = 0u; r < N_R; ++r) {
#ifdef HAS_OFFSET
                sums[r][t] += fma(part[r][t], w[r][h].factor, -(w[r][h].offset * x_sum[t]));
#else
                sums[r][t] = fma(part[r][t], w[r][h].factor, sums[r][t]);
#endif
            }
        }
    }
}

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    uint me = gl_LocalInvocationIndex;
    uint base = WORKGROUP_INDEX * ROWS;
    if (base >= push.n_out) { return; }
    // Teams beside each other, which may be of one subgroup, read the same x for different weight rows.
    uint first = base + TEAM % (TEAMS / SPLIT) * N_R;
    uint own = TEAM / (TEAMS / SPLIT) * LANES + LANE;

#ifdef RESIDUAL
    const uint OUTPUTS = (ROWS * TOKENS + LOCAL_SIZE - 1u) / LOCAL_SIZE;
    float before[OUTPUTS];
    [[unroll]] for (uint k = 0u; k < OUTPUTS; ++k) {
        uint i = min(me + k * LOCAL_SIZE, ROWS * TOKENS - 1u);
        before[k] = residual[push.residual_at + i / ROWS * push.residual_row + min(base + i % ROWS, push.n_out - 1u)];
    }
#endif

    float sums[N_R][TOKENS];
    float squares[TOKENS];
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        squares[t] = 0.0;
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r][t] = 0.0; }
    }
    const uint tile = TILE == 0u ? push.n_in : TILE;
    for (uint start = 0u; start < push.n_in; start += tile) {
        uint columns = min(tile, push.n_in - start), piece_0 = start / PIECE, pieces = columns / PIECE;
        Chunk w[AHEAD][N_R][HALVES];
        fetch(w, planes, first, piece_0, own, pieces);
        if (TILE != 0u) {
            if (start > 0u) { barrier(); }
            prepare_tile(start, columns, squares);  // while the first weights are on their way
            barrier();
        }
        for (uint p = own; p < pieces; p += STRIDE * AHEAD) {  // counted from the start of the tile
            if (p != own) { fetch(w, planes, first, piece_0, p, pieces); }
            [[unroll]] for (uint a = 0u; a < AHEAD; ++a) {
                if (p + a * STRIDE < pieces) { multiply(w[a], p + a * STRIDE, sums); }
            }
        }
    }
#ifdef NORM
    if (TILE == 0u) { prepare_tile(0u, push.n_in, squares); }
#endif
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
#ifdef NORM
        float square = workgroup_add(squares[t]);
        if (me == 0u) { squares_sum[t] = square; }
#endif
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            float value = team_add(sums[r][t]);
            if (LANE == 0u) { team_sums[(TEAM * N_R + r) * TOKENS + t] = value; }
        }
    }
    barrier();
#ifdef SWIGLU
    for (uint i = me; i < ROWS / 2u * TOKENS; i += LOCAL_SIZE) {
        uint pair = i % (ROWS / 2u), t = i / (ROWS / 2u);
        float gate = joined(2u * pair, t), up = joined(2u * pair + 1u, t);
        if (base + 2u * pair < push.n_out) { y[push.y_at + t * push.y_row + base / 2u + pair] = gate / (1.0 + exp(-gate)) * up; }
    }
#else
    [[unroll]] for (uint k = 0u; k < (ROWS * TOKENS + LOCAL_SIZE - 1u) / LOCAL_SIZE; ++k) {
        uint i = me + k * LOCAL_SIZE, row = i % ROWS, t = i / ROWS;
        if (t < TOKENS && base + row < push.n_out) {
            precise float value = joined(row, t);  // scaling and adding are never contracted to a fma
#ifdef RESIDUAL
            value += before[k];
#endif
            y[push.y_at + t * push.y_row + base + row] = value;
        }
    }
#endif
}
