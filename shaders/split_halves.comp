#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Rows of x for a product on cooperative matrices, one workgroup per row: x is scaled by a power of two so that its
// largest column is in [1, 2), and each column becomes the sum of two f16. Of every 32 columns, at 8 quads: the larger
// halves, then the smaller ones, two columns a word; after the columns of all rows, the sum of every 16 columns; last
// the factor of every row that undoes the scaling. With NORM x is RMS-normalised first, with GROUPS scaled in groups.
// An invocation has QUADS quads of columns in registers: a row is read once, all of it at a time.
layout(constant_id = 0) const uint QUADS = 1u;

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

shared float quad_sums[QUADS * LOCAL_SIZE];

#ifdef GROUPS
float group_scale(uint row, uint column) {
    uint at = push.norm_at + (row * (push.n / push.group_size) + column / push.group_size) * push.group_parts;
    float sum = 0.0;
    for (uint i = 0u; i < push.group_parts; ++i) { sum += group_squares[at + i]; }
    return inversesqrt(sum / float(push.group_size) + push.eps);
}
#endif

void main() {
    uint row = WORKGROUP_INDEX;
    if (row >= push.n_rows) { return; }
    uint n_quads = push.n / 4u, n_chunks = push.n / 16u, me = gl_LocalInvocationIndex;
    vec4 v[QUADS];
    float squares = 0.0, largest = 0.0;
    [[unroll]] for (uint k = 0u; k < QUADS; ++k) {
        uint quad = me + k * LOCAL_SIZE;
        v[k] = quad < n_quads ? x_quads[(push.x_at + row * push.x_row) / 4u + quad] : vec4(0.0);
    }
    [[unroll]] for (uint k = 0u; k < QUADS; ++k) {
        uint quad = min(me + k * LOCAL_SIZE, n_quads - 1u);
        squares += dot(v[k], v[k]);
#if defined(NORM)
        v[k] *= norm_quads[push.norm_at / 4u + quad];
#elif defined(GROUPS)
        v[k] *= group_scale(row, quad * 4u);
#endif
        vec4 size = abs(v[k]);
        largest = max(largest, max(max(size.x, size.y), max(size.z, size.w)));
    }
    float scale = 1.0;
#ifdef NORM
    scale = inversesqrt(workgroup_add(squares) / float(push.n) + push.eps);
#endif
    // Powers of two by their bits; kept away from the ends, where one of the two would not be a normal number.
    uint exponent = clamp(floatBitsToUint(workgroup_max(largest) * scale) >> 23, 1u, 253u);
    float down = uintBitsToFloat((254u - exponent) << 23);
    uint sums_at = push.y_at + push.n_rows * push.n, factors_at = sums_at + push.n_rows * n_chunks;
    if (me == 0u) { y[factors_at + row] = exponent << 23; }
    [[unroll]] for (uint k = 0u; k < QUADS; ++k) {
        uint quad = me + k * LOCAL_SIZE, at = push.y_at + row * push.n + quad / 8u * 32u + quad % 8u * 2u;
        vec4 of = v[k] * scale * down;
        quad_sums[quad] = (of.x + of.y) + (of.z + of.w);
        // The bits that f16 has no room for are cut off, not rounded by packing and unpacking: a driver may leave out both.
        vec4 high = uintBitsToFloat(floatBitsToUint(of) & 0xFFFFE000u), rest = of - high;
        if (quad < n_quads) {
            y[at] = packHalf2x16(high.xy);
            y[at + 1u] = packHalf2x16(high.zw);
            y[at + 16u] = packHalf2x16(rest.xy);
            y[at + 17u] = packHalf2x16(rest.zw);
        }
    }
    barrier();
    for (uint chunk = me; chunk < n_chunks; chunk += LOCAL_SIZE) {
        uint from = chunk * 4u;
        float sum = (quad_sums[from] + quad_sums[from + 1u]) + (quad_sums[from + 2u] + quad_sums[from + 3u]);
        y[sums_at + row * n_chunks + chunk] = floatBitsToUint(sum);
    }
}
