#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// The best (value, index) of a row: the first of equal values, never a NaN. A workgroup looks at one span of a row; the
// last one of a row chooses among the spans.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) coherent buffer Pairs { uint pairs[]; };
layout(binding = 2) coherent buffer Counters { uint counters[]; };
layout(binding = 3) buffer Y { uint y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint n; uint span; uint n_spans; uint pairs_at; uint counters_at; uint y_at; uint n_rows;
} push;

#include "last.glsl"

const uint NONE = 0xFFFFFFFFu;
#define BEFORE_ALL uintBitsToFloat(0xFF800000u)  // -infinity

shared float best_values[LOCAL_SIZE];
shared uint best_indices[LOCAL_SIZE];

void keep_better(inout float value, inout uint index, float other, uint other_index) {
    if (other > value || (other == value && other_index < index)) { value = other; index = other_index; }
}

// The best of what the invocations hold, in invocation 0.
void join(inout float value, inout uint index) {
    uint me = gl_LocalInvocationIndex;
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
}

void main() {
    uint row = WORKGROUP_INDEX / push.n_spans, part = WORKGROUP_INDEX % push.n_spans;
    if (row >= push.n_rows) { return; }
    uint me = gl_LocalInvocationIndex;
    float value = BEFORE_ALL;
    uint index = NONE;
    uint end = min((part + 1u) * push.span, push.n);
    for (uint i = part * push.span + me; i < end; i += LOCAL_SIZE) {
        keep_better(value, index, x[push.x_at + row * push.x_row + i], i);
    }
    join(value, index);
    if (push.n_spans > 1u) {
        uint first = push.pairs_at + row * push.n_spans * 2u;
        if (me == 0u) {
            pairs[first + 2u * part] = floatBitsToUint(value);
            pairs[first + 2u * part + 1u] = index;
        }
        if (!last_of(push.n_spans, push.counters_at + row)) { return; }
        value = BEFORE_ALL;
        index = NONE;
        for (uint i = me; i < push.n_spans; i += LOCAL_SIZE) {
            keep_better(value, index, uintBitsToFloat(pairs[first + 2u * i]), pairs[first + 2u * i + 1u]);
        }
        join(value, index);
    }
    if (me == 0u) { y[push.y_at + row] = index == NONE ? 0u : index; }  // a row of NaN only
}
