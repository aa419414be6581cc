// A product's result as bytes for the next product (bytes.glsl), made where the result is made: saves a level.
//
// With EMIT, and with RESIDUAL scaled by the weights of the norm that comes next. N_COLUMNS, a power of 2, is how many columns of
// the result a workgroup has. With 16 and more they go through workgroup memory; else the last one of the workgroups that
// share a chunk of 16 does it. The including kernel defines EMIT_AT, the first free binding, has its result in
// `coherent ... y[]`, calls `made` for each number of it, and ORDER is a specialisation constant.

#ifdef RESIDUAL
layout(binding = EMIT_AT) readonly buffer NextNorm { vec4 next_norm[]; };
#define EMIT_TO (EMIT_AT + 1)
#else
#define EMIT_TO EMIT_AT
#endif
layout(binding = EMIT_TO) writeonly buffer Bytes { uint bytes[]; };
layout(binding = EMIT_TO) writeonly buffer ByteScales { float byte_scales[]; };
layout(binding = EMIT_TO + 1) coherent buffer Counters { uint counters[]; };

#include "bytes.glsl"
#include "last.glsl"

shared float numbers[N_COLUMNS < 16u ? 1u : N_COLUMNS * TOKENS];

void made(float value, uint column, uint t) {
    if (N_COLUMNS >= 16u) { numbers[t * N_COLUMNS + column] = value; }
}

// When all columns from `first` on of the `n` of the result are made (those from `n` on do not exist). Uniform control flow.
void emit(uint first, uint n) {
    const uint quads = max(N_COLUMNS, 16u) / 4u;
    uint from = first / 16u * 4u;
#ifdef RESIDUAL
    // Asked for before waiting.
    vec4 norm = next_norm[push.next_norm_at / 4u + min(from + gl_LocalInvocationIndex % quads, n / 4u - 1u)];
#endif
    if (N_COLUMNS >= 16u) {
        barrier();
    } else if (!last_of(16u / N_COLUMNS, push.counters_at + first / 16u)) {
        return;
    }
    for (uint i = gl_LocalInvocationIndex; i < quads * TOKENS; i += LOCAL_SIZE) {  // i % quads stays: LOCAL_SIZE is its multiple
        uint t = i / quads, quad = from + i % quads;
        if (quad < n / 4u) {
            vec4 v;
            if (N_COLUMNS >= 16u) {
                uint at = i * 4u;
                v = vec4(numbers[at], numbers[at + 1u], numbers[at + 2u], numbers[at + 3u]);
            } else {
                uint at = push.y_at + t * push.y_row + quad * 4u;
                v = vec4(y[at], y[at + 1u], y[at + 2u], y[at + 3u]);
            }
            float squares = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, v.w * v.w)));
#ifdef RESIDUAL
            v *= norm;
#endif
            store_bytes(v, squares, ORDER, push.bytes_at + t * push.bytes_row, n, quad, true);
        }
    }
}
