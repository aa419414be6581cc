// Packed weight rows, 16 columns (a chunk) at a time. Planes: vkbackend/quants.py.
//
// The including kernel declares binding 0 as the weight buffer, twice: `uint w_words[]` and `uvec4 w_quads[]`, and
// defines one W_<FORMAT>. `planes` holds the first word of each plane; rows follow each other in a plane.
//
//   Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk)   as it lies in memory: few registers
//   void load_piece(planes, n_in, row, uint piece, out Chunk[HALVES]) HALVES chunks that follow each other, with few loads
//   vec4 unpack(Chunk c, uint i)                                      columns 4 i .. 4 i + 3, without factor and offset
//   vec4 weights(Chunk c, uint i)                                     these columns as the weights themselves
//   c.factor, c.offset                                                weight = unpacked * factor - offset (HAS_OFFSET)

#ifndef WEIGHTS_ONCE  // this file may come twice, for two formats: second_weights.glsl
#define WEIGHTS_ONCE
float f16_at(uint plane, uint index) {
    vec2 both = unpackHalf2x16(w_words[plane + index / 2u]);
    return (index & 1u) == 0u ? both.x : both.y;
}

// A byte as a float, less a small number. GPUs have few units for converting integers (16 against 128 for sums in an H200's
// multiprocessor): ORed into the mantissa of 2^23, a byte stands for 2^23 + byte. Taking 2^23 away again is exact.
float byte_float(uint byte, float less) { return uintBitsToFloat(byte | 0x4B000000u) - (8388608.0 + less); }

// The four signed bytes of a word as floats.
vec4 signed_bytes(uint word) {
    uint low = word ^ 0x80808080u, high = low >> 16;  // now 0 .. 255
    return fma(
        uintBitsToFloat((uvec4(low, low, high, high) & uvec4(0xFFu, 0xFF00u, 0xFFu, 0xFF00u)) | 0x4B000000u),
        vec4(1.0, 1.0 / 256.0, 1.0, 1.0 / 256.0),
        vec4(-8388736.0, -32896.0, -8388736.0, -32896.0));
}

#endif

#if defined(W_F32)

#define HALVES 1u

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

#define HALVES 1u

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

#define HALVES 2u

struct Chunk { uvec4 q; float factor; };

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = w_quads[planes.x / 4u + row * (n_in / 16u) + chunk];
    c.factor = f16_at(planes.y, row * ((n_in / 32u + 1u) & ~1u) + chunk / 2u);
    return c;
}

void load_piece(uvec3 planes, uint n_in, uint row, uint piece, out Chunk halves[2]) {
    float factor = f16_at(planes.y, row * ((n_in / 32u + 1u) & ~1u) + piece);
    [[unroll]] for (uint h = 0u; h < 2u; ++h) {
        halves[h].q = w_quads[planes.x / 4u + row * (n_in / 16u) + piece * 2u + h];
        halves[h].factor = factor;
    }
}

vec4 unpack(Chunk c, uint i) { return signed_bytes(c.q[i]); }

#else
#include "weights_packed.glsl"
#endif

#if defined(W_F32) || defined(W_F16) || defined(W_BF16)
void load_piece(uvec3 planes, uint n_in, uint row, uint piece, out Chunk halves[1]) {
    halves[0] = load_chunk(planes, n_in, row, piece);
}
#endif

// Columns 4 i .. 4 i + 3 of a chunk as the weights themselves.
vec4 weights(Chunk c, uint i) {
#ifdef HAS_OFFSET
    return unpack(c, i) * c.factor - c.offset;
#else
    return unpack(c, i) * c.factor;
#endif
}
