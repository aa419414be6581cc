#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// The best (value, index) of one span of a row: the first of equal values, never a NaN. A first pass reads the row and
// writes one pair per span; a second pass (PAIRS) reads those pairs and writes the index.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { uint x[]; };
layout(binding = 1) buffer Y { uint y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint n; uint span; uint n_spans; uint y_at; uint n_rows;
} push;

shared float best_values[LOCAL_SIZE];
shared uint best_indices[LOCAL_SIZE];

void keep_better(inout float value, inout uint index, float other, uint other_index) {
    if (other > value || (other == value && other_index < index)) { value = other; index = other_index; }
}

void main() {
    uint row = WORKGROUP_INDEX / push.n_spans, part = WORKGROUP_INDEX % push.n_spans;
    if (row >= push.n_rows) { return; }
    uint me = gl_LocalInvocationIndex;
    float value = uintBitsToFloat(0xFF800000u);  // -infinity
    uint index = 0xFFFFFFFFu;
    uint end = min((part + 1u) * push.span, push.n);
    for (uint i = part * push.span + me; i < end; i += LOCAL_SIZE) {
#ifdef PAIRS
        uint at = push.x_at + row * push.x_row + 2u * i;
        keep_better(value, index, uintBitsToFloat(x[at]), x[at + 1u]);
#else
        keep_better(value, index, uintBitsToFloat(x[push.x_at + row * push.x_row + i]), i);
#endif
    }
    best_values[me] = value;
    best_indices[me] = index;
    for (uint half_width = LOCAL_SIZE / 2u; half_width > 0u; half_width /= 2u) {
        barrier();
        if (me < half_width) {
            keep_better(value, index, best_values[me + half_width], best_indices[me + half_width]);
            best_values[me] = value;
            best_indices[me] = index;
        }
    }
    if (me == 0u) {
#ifdef PAIRS
        y[push.y_at + row] = index == 0xFFFFFFFFu ? 0u : index;  // a row of NaN only
#else
        uint at = push.y_at + (row * push.n_spans + part) * 2u;
        y[at] = floatBitsToUint(value);
        y[at + 1u] = index;
#endif
    }
}
