#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Rows of x for a product on cooperative matrices, one workgroup per row: x is scaled by a power of two so that its
// largest column is in [1, 2), and each column becomes the sum of two f16. Of every 32 columns, at 8 quads: the larger
// halves, then the smaller ones, two columns a word; after the columns of all rows, the sum of every 16 columns; last
// the factor of every row that undoes the scaling. With NORM x is RMS-normalised first, with GROUPS scaled in groups.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { vec4 x_quads[]; };
layout(binding = 1) buffer Y { uint y[]; };
#if defined(NORM)
layout(binding = 2) readonly buffer Norm { vec4 norm_quads[]; };
#elif defined(GROUPS)
layout(binding = 2) readonly buffer Squares { float group_squares[]; };
#endif
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint y_at; uint n; uint n_rows;
    uint norm_at; float eps; uint group_size; uint group_parts;
} push;

float group_scale(uint row, uint column) {
#ifdef GROUPS
    uint at = push.norm_at + (row * (push.n / push.group_size) + column / push.group_size) * push.group_parts;
    float sum = 0.0;
    for (uint i = 0u; i < push.group_parts; ++i) { sum += group_squares[at + i]; }
    return inversesqrt(sum / float(push.group_size) + push.eps);
#else
    return 1.0;
#endif
}

vec4 prepared(uint row, uint quad, float scale) {
    vec4 v = x_quads[(push.x_at + row * push.x_row) / 4u + quad] * scale;
#ifdef NORM
    v *= norm_quads[push.norm_at / 4u + quad];
#endif
    return v;
}

void main() {
    uint row = WORKGROUP_INDEX;
    if (row >= push.n_rows) { return; }
    uint n_chunks = push.n / 16u;
    float scale = 1.0;
#ifdef NORM
    float squares = 0.0;
    for (uint quad = gl_LocalInvocationIndex; quad < push.n / 4u; quad += LOCAL_SIZE) {
        vec4 v = x_quads[(push.x_at + row * push.x_row) / 4u + quad];
        squares += dot(v, v);
    }
    scale = inversesqrt(workgroup_add(squares) / float(push.n) + push.eps);
#endif
    float largest = 0.0;
    for (uint chunk = gl_LocalInvocationIndex; chunk < n_chunks; chunk += LOCAL_SIZE) {
        float s = scale * group_scale(row, chunk * 16u);
        for (uint i = 0u; i < 4u; ++i) {
            vec4 v = abs(prepared(row, chunk * 4u + i, s));
            largest = max(largest, max(max(v.x, v.y), max(v.z, v.w)));
        }
    }
    // Powers of two by their bits; kept away from the ends, where one of the two would not be a normal number.
    uint exponent = clamp(floatBitsToUint(workgroup_max(largest)) >> 23, 1u, 253u);
    float down = uintBitsToFloat((254u - exponent) << 23);
    uint sums_at = push.y_at + push.n_rows * push.n, factors_at = sums_at + push.n_rows * n_chunks;
    if (gl_LocalInvocationIndex == 0u) { y[factors_at + row] = exponent << 23; }
    for (uint chunk = gl_LocalInvocationIndex; chunk < n_chunks; chunk += LOCAL_SIZE) {
        float s = scale * group_scale(row, chunk * 16u), sum = 0.0;
        uint at = push.y_at + row * push.n + chunk / 2u * 32u + chunk % 2u * 8u;
        for (uint i = 0u; i < 4u; ++i) {
            vec4 v = prepared(row, chunk * 4u + i, s) * down;
            sum += (v.x + v.y) + (v.z + v.w);
            // The bits that f16 has no room for are cut off, not rounded by packing and unpacking: a driver may leave out both.
            vec4 high = uintBitsToFloat(floatBitsToUint(v) & 0xFFFFE000u), rest = v - high;
            y[at + 2u * i] = packHalf2x16(high.xy);
            y[at + 2u * i + 1u] = packHalf2x16(high.zw);
            y[at + 16u + 2u * i] = packHalf2x16(rest.xy);
            y[at + 16u + 2u * i + 1u] = packHalf2x16(rest.zw);
        }
        y[sums_at + row * n_chunks + chunk] = floatBitsToUint(sum);
    }
}
