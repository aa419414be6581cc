#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "common.glsl"

// Rows of x, scaled as the product that follows wants them (NORM: by the norm's weights; GROUPS: each group of columns to a
// mean square of 1), as 16-bit integers for linear_dots.comp. An invocation takes 4 columns of a row.
layout(constant_id = 0) const uint ORDER = 0u;
layout(constant_id = 1) const uint PARTS = 1u;  // sums of squares of a group of columns

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { vec4 x_quads[]; };
layout(binding = 1) writeonly buffer Bytes { uint bytes[]; };
layout(binding = 1) writeonly buffer ByteScales { float byte_scales[]; };
#if defined(NORM)
layout(binding = 2) readonly buffer Norm { vec4 norm_quads[]; };
#elif defined(GROUPS)
layout(binding = 2) readonly buffer Squares { float group_squares[]; };
#endif
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint bytes_at; uint bytes_row; uint n_in; uint n_rows; uint norm_at; float eps; uint group_size;
} push;

#include "bytes.glsl"

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

void main() {
    uint n_quads = push.n_in / 4u, item = WORKGROUP_INDEX * LOCAL_SIZE + gl_LocalInvocationIndex;
    bool valid = item < push.n_rows * n_quads;
    item = min(item, push.n_rows * n_quads - 1u);
    uint t = item / n_quads, quad = item % n_quads;
    vec4 v = x_quads[(push.x_at + t * push.x_row) / 4u + quad];
    float squares = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, v.w * v.w)));
#ifdef NORM
    v *= norm_quads[push.norm_at / 4u + quad];
#endif
#ifdef GROUPS
    v *= group_scale(t, quad * 4u);
#endif
    store_bytes(v, squares, ORDER, push.bytes_at + t * push.bytes_row, push.n_in, quad, valid);
}
