// Chunks of the formats with fewer than 8 bits: planes of 4, 2 and 1 bits a column, and their scales.
// Layouts: vkbackend/planes.py, quants.py, k_quants.py; interface: weights.glsl.

#ifndef PACKED_WEIGHTS_ONCE
layout(binding = 0) readonly buffer WeightPairs { uvec2 w_pairs[]; };
#endif

#if defined(W_Q4_1) || defined(W_Q5_1) || defined(W_Q4_K) || defined(W_Q5_K) || defined(W_Q2_K)
#define HAS_OFFSET
#endif
#if !defined(W_Q2_K) && !defined(W_Q3_K)
#define HAS_NIBBLES
#endif
#if defined(W_Q2_K) || defined(W_Q3_K) || defined(W_Q6_K)
#define HAS_PAIRS
#endif
#if defined(W_Q5_0) || defined(W_Q5_1) || defined(W_Q5_K) || defined(W_Q3_K)
#define HAS_BITS
#endif
#define HALVES 2u

struct Chunk {
#ifdef HAS_NIBBLES
    uvec2 q;  // 16 columns of 4 bits
#endif
#ifdef HAS_PAIRS
    uint pairs;  // 16 columns of 2 bits
#endif
#ifdef HAS_BITS
    uint bits;  // 16 columns of 1 bit in the low half
#endif
    float factor;
#ifdef HAS_OFFSET
    float offset;
#endif
};

// ---- loads. Rows of planes of quants are padded to 16 bytes; a row has a multiple of 32 columns, a piece is 32 of them.

// Scale and offset of the two halves of a piece.
void load_scales(uvec3 planes, uint n_in, uint row, uint piece, out vec2 factor, out vec2 offset) {
#if defined(HAS_BITS) || defined(W_Q6_K)
    uint scales = planes.z;
#else
    uint scales = planes.y;
#endif
    offset = vec2(0.0);
#if defined(W_Q4_0) || defined(W_Q5_0) || defined(W_IQ4_NL)
    factor = vec2(f16_at(scales, row * ((n_in / 32u + 1u) & ~1u) + piece));
#elif defined(W_Q4_1) || defined(W_Q5_1)
    vec2 d = unpackHalf2x16(w_words[scales + row * (n_in / 32u) + piece]);
    factor = vec2(d.x);
    offset = vec2(-d.y);
#elif defined(W_MXFP4)
    uint e = (w_words[scales + row * ((n_in / 32u + 3u) / 4u) + piece / 4u] >> (piece % 4u * 8u)) & 0xFFu;
    factor = vec2(uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23));
#elif defined(W_IQ4_XS)
    uint record = scales + (row * (n_in / 256u) + piece / 8u) * 3u;
    int small = bitfieldExtract(int(w_words[record + piece % 8u / 4u]), int(piece % 4u * 8u), 8);
    factor = vec2(unpackHalf2x16(w_words[record + 2u]).x * float(small));
#else
    // A K-scales record: 4 words of small numbers, 16 bits a piece, and one of d and dmin for each 256 columns.
    uint record = scales + (row * (n_in / 256u) + piece / 8u) * 5u;
    uint small = w_words[record + piece % 8u / 2u] >> (piece % 2u * 16u);
    vec2 d = unpackHalf2x16(w_words[record + 4u]);
#if defined(W_Q4_K) || defined(W_Q5_K)
    factor = vec2(d.x * byte_float(small & 0xFFu, 0.0));
    offset = vec2(d.y * byte_float((small >> 8) & 0xFFu, 0.0));
#elif defined(W_Q2_K)
    factor = d.x * vec2(small & 15u, (small >> 8) & 15u);
    offset = d.y * vec2((small >> 4) & 15u, (small >> 12) & 15u);
#else
    small ^= 0x8080u;
    factor = d.x * vec2(byte_float(small & 0xFFu, 128.0), byte_float((small >> 8) & 0xFFu, 128.0));
#endif
#endif
}

void load_piece(uvec3 planes, uint n_in, uint row, uint piece, out Chunk halves[2]) {
    vec2 factor, offset;
    load_scales(planes, n_in, row, piece, factor, offset);
#ifdef HAS_NIBBLES
    uvec4 q = w_quads[planes.x / 4u + row * (n_in / 32u) + piece];
    halves[0].q = q.xy;
    halves[1].q = q.zw;
#endif
#ifdef HAS_PAIRS  // only formats with blocks of 256 columns: their rows need no padding
#ifdef HAS_NIBBLES
    uint plane = planes.y;
#else
    uint plane = planes.x;
#endif
    uvec2 pairs = w_pairs[plane / 2u + row * (n_in / 32u) + piece];
    halves[0].pairs = pairs.x;
    halves[1].pairs = pairs.y;
#endif
#ifdef HAS_BITS
    uint bits = w_words[planes.y + row * ((n_in / 32u + 3u) & ~3u) + piece];
    halves[0].bits = bits;  // what is above 16 bits is masked later
    halves[1].bits = bits >> 16;
#endif
    [[unroll]] for (uint h = 0u; h < 2u; ++h) {
        halves[h].factor = factor[h];
#ifdef HAS_OFFSET
        halves[h].offset = offset[h];
#endif
    }
}

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    vec2 factor, offset;
    load_scales(planes, n_in, row, chunk / 2u, factor, offset);
    Chunk c;
    c.factor = factor[chunk % 2u];
#ifdef HAS_OFFSET
    c.offset = offset[chunk % 2u];
#endif
#ifdef HAS_NIBBLES
    c.q = w_pairs[planes.x / 2u + row * (n_in / 16u) + chunk];
#endif
#ifdef HAS_PAIRS
#ifdef HAS_NIBBLES
    c.pairs = w_words[planes.y + row * (n_in / 16u) + chunk];
#else
    c.pairs = w_words[planes.x + row * (n_in / 16u) + chunk];
#endif
#endif
#ifdef HAS_BITS
    c.bits = w_words[planes.y + row * ((n_in / 32u + 3u) & ~3u) + chunk / 2u] >> (chunk % 2u * 16u);
#endif
    return c;
}

#ifndef PACKED_WEIGHTS_ONCE
#define PACKED_WEIGHTS_ONCE
// ---- unpacking. Whatever its plane, a field of column 4 i + k comes to bit 4 k (+ 2 or 4) with one shift.

uint nibbles_of(uvec2 q, uint i) { return (i < 2u ? q.x : q.y) >> (i % 2u * 16u); }

uint pairs_of(uint pairs, uint i) { return pairs >> (i / 2u * 16u + i % 2u * 2u); }

uint bits_of(uint bits, uint i, uint to) { return (bits << to) >> i; }

// Fields of up to 7 bits at bits 0, 4, 8, 12 as floats, less a small number, like byte_float: in the mantissa of 2^23 a field
// stands for 2^23 + field * 16^k, and one multiply-add takes both away again, exactly.
vec4 fields(uvec4 masked, float less) {
    return fma(
        uintBitsToFloat(masked | 0x4B000000u),
        vec4(1.0, 1.0 / 16.0, 1.0 / 256.0, 1.0 / 4096.0),
        vec4(-8388608.0 - less, -524288.0 - less, -32768.0 - less, -2048.0 - less));
}

const uvec4 AT = uvec4(1u, 16u, 256u, 4096u);

#endif

#if defined(W_IQ4_NL) || defined(W_IQ4_XS)
const uvec4 VALUES = uvec4(0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u);  // of each 4 nibbles, as signed bytes
#elif defined(W_MXFP4)
const uvec4 VALUES = uvec4(0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu);
#endif

vec4 unpack(Chunk c, uint i) {
#if defined(W_Q4_0)
    return fields(nibbles_of(c.q, i) & 15u * AT, 8.0);
#elif defined(W_Q4_1) || defined(W_Q4_K)
    return fields(nibbles_of(c.q, i) & 15u * AT, 0.0);
#elif defined(W_Q5_0)
    return fields((nibbles_of(c.q, i) & 15u * AT) | (bits_of(c.bits, i, 4u) & 16u * AT), 16.0);
#elif defined(W_Q5_1) || defined(W_Q5_K)
    return fields((nibbles_of(c.q, i) & 15u * AT) | (bits_of(c.bits, i, 4u) & 16u * AT), 0.0);
#elif defined(W_Q6_K)
    uint high = i < 2u ? c.pairs << (4u - 2u * i) : c.pairs >> (8u + 2u * i);  // pairs_of(c.pairs, i) << 4
    return fields((nibbles_of(c.q, i) & 15u * AT) | (high & 48u * AT), 32.0);
#elif defined(W_Q2_K)
    return fields(pairs_of(c.pairs, i) & 3u * AT, 0.0);
#elif defined(W_Q3_K)
    return fields((pairs_of(c.pairs, i) & 3u * AT) | (bits_of(c.bits, i, 2u) & 4u * AT), 4.0);
#else
    uvec4 n = uvec4(nibbles_of(c.q, i)) >> uvec4(0u, 4u, 8u, 12u);
    // Two bits pick the word, two the byte. An array indexed by lanes that differ would be read lane by lane.
    uvec4 low = mix(uvec4(VALUES.x), uvec4(VALUES.y), notEqual(n & 4u, uvec4(0u)));
    uvec4 high = mix(uvec4(VALUES.z), uvec4(VALUES.w), notEqual(n & 4u, uvec4(0u)));
    uvec4 words = mix(low, high, notEqual(n & 8u, uvec4(0u)));
    return vec4(ivec4(words << (24u - (n & 3u) * 8u)) >> 24);
#endif
}
