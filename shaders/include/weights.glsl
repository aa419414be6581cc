// Packed weight rows, 16 columns (a chunk) at a time. Planes: vkbackend/quants.py.
//
// The including kernel declares binding 0 as the weight buffer, twice: `uint w_words[]` and `uvec4 w_quads[]`, and
// defines one W_<FORMAT>. `planes` holds the first word of each plane; rows follow each other in a plane.
//
//   Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk)   as it lies in memory: few registers
//   vec4 unpack(Chunk c, uint i)                                      columns 4 i .. 4 i + 3, without factor and offset
//   c.factor, c.offset                                                weight = unpacked * factor - offset (HAS_OFFSET)

float f16_at(uint plane, uint index) {
    vec2 both = unpackHalf2x16(w_words[plane + index / 2u]);
    return (index & 1u) == 0u ? both.x : both.y;
}

vec4 signed_bytes(uint word) {
    int w = int(word);
    return vec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 16, 8), bitfieldExtract(w, 24, 8));
}

#if defined(W_F32)

struct Chunk { uvec4 q[4]; float factor; };

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    uint at = planes.x / 4u + row * ((n_in + 3u) / 4u) + chunk * 4u;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) { c.q[i] = w_quads[at + i]; }
    c.factor = 1.0;
    return c;
}

vec4 unpack(Chunk c, uint i) { return uintBitsToFloat(c.q[i]); }

#elif defined(W_F16) || defined(W_BF16)

struct Chunk { uvec4 q[2]; float factor; };

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    uint at = planes.x / 4u + row * ((n_in + 7u) / 8u) + chunk * 2u;
    [[unroll]] for (uint i = 0u; i < 2u; ++i) { c.q[i] = w_quads[at + i]; }
    c.factor = 1.0;
    return c;
}

vec4 unpack(Chunk c, uint i) {
    uvec2 q = (i & 1u) == 0u ? c.q[i / 2u].xy : c.q[i / 2u].zw;
#ifdef W_F16
    return vec4(unpackHalf2x16(q.x), unpackHalf2x16(q.y));
#else
    return uintBitsToFloat(uvec4(q.x << 16, q.x & 0xFFFF0000u, q.y << 16, q.y & 0xFFFF0000u));
#endif
}

#elif defined(W_Q8_0)

struct Chunk { uvec4 q; float factor; };

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = w_quads[planes.x / 4u + row * (n_in / 16u) + chunk];
    c.factor = f16_at(planes.y, row * ((n_in / 32u + 1u) & ~1u) + chunk / 2u);
    return c;
}

vec4 unpack(Chunk c, uint i) { return signed_bytes(c.q[i]); }

#else
#include "weights_packed.glsl"
#endif
