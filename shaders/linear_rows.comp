#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Product of a weight matrix with 1..16 rows of x (include/rows.glsl): the batch-invariant kernel of decoding.
layout(constant_id = 0) const uint TOKENS = 1u;
layout(constant_id = 1) const uint N_R = 1u;
layout(constant_id = 2) const uint SPLIT = 1u;
layout(constant_id = 3) const uint AHEAD = 1u;  // chunks whose loads are under way at a time

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
layout(binding = 4) readonly buffer Residual { float residuals[]; };
#else
layout(binding = 3) readonly buffer Residual { float residuals[]; };
#endif
#endif
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out;
    uint x_at; uint x_row; uint y_at; uint y_row;
    uint norm_at; float eps; uint residual_at; uint residual_row; uint group_size; uint group_parts;
} push;

void put_y(uint i, float value) { y[i] = value; }

#ifdef NORM
#define HAS_NORM(p) true
vec4 norm_quad(uint i) { return norm_quads[i]; }
#else
#define HAS_NORM(p) false
vec4 norm_quad(uint i) { return vec4(1.0); }
#endif
#ifdef GROUPS
#define HAS_GROUPS(p) true
float square(uint i) { return group_squares[i]; }
#else
#define HAS_GROUPS(p) false
float square(uint i) { return 0.0; }
#endif
#ifdef RESIDUAL
#define HAS_RESIDUAL(p) true
float residual(uint i) { return residuals[i]; }
#else
#define HAS_RESIDUAL(p) false
float residual(uint i) { return 0.0; }
#endif
#ifdef SWIGLU
#define HAS_SWIGLU(p) true
#else
#define HAS_SWIGLU(p) false
#endif
#define GROUP_SCALE(p, t, column) group_scale(p, t, column)
#define ADD_CHUNK add_chunk
#define CHUNK Chunk
#define UNPACK unpack

#include "rows.glsl"

vec4 x_quad(Product p, uint t, uint i) { return x_quads[(p.x_at + t * p.x_row) / 4u + i]; }

#include "weights.glsl"
#include "rows_sums.glsl"

void main() {
    Product p = Product(
        uvec3(push.plane_0, push.plane_1, push.plane_2), push.n_in, push.n_out, SPLIT, push.x_at, push.x_row, push.y_at, push.y_row,
        push.norm_at, push.eps, push.residual_at, push.residual_row, push.group_size, push.group_parts, 0u);
    uint base = WORKGROUP_INDEX * rows_of_group(p);
    if (base >= push.n_out) { return; }
    uint first = base + TEAM % slots(p) * N_R;
    float sums[N_R][TOKENS];
    float squares[TOKENS];
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        squares[t] = 0.0;
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r][t] = 0.0; }
    }
    const uint stride = LANES * SPLIT;
    uint n_chunks = push.n_in / 16u;
    for (uint chunk = TEAM / slots(p) * LANES + LANE; chunk < n_chunks; chunk += stride * AHEAD) {
        Chunk w[AHEAD][N_R];
        [[unroll]] for (uint a = 0u; a < AHEAD; ++a) {
            [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                // Past the end of a row or of the matrix something is loaded again and not used.
                w[a][r] = load_chunk(p.planes, push.n_in, min(first + r, push.n_out - 1u), min(chunk + a * stride, n_chunks - 1u));
            }
        }
        [[unroll]] for (uint a = 0u; a < AHEAD; ++a) {
            if (chunk + a * stride < n_chunks) { add_chunk(p, w[a], chunk + a * stride, sums, squares); }
        }
    }
    keep_sums(p, sums, squares);
    barrier();
    put_rows(p, base);
}
