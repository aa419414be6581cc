// Dot products of four signed bytes with four signed bytes, and weights as such bytes.
//
//   int dot4(uint a, uint b)        a.0 b.0 + a.1 b.1 + a.2 b.2 + a.3 b.3
//   uvec4 dot_words(Chunk c)        the 16 columns of a chunk as bytes, in the order below
//   LESS                            weight = (byte - LESS) * factor - offset
//
// The order of columns is what takes few shifts; sums of products do not mind, if x has the same order:
//   BYTES (q8_0)          0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15
//   NIBBLES (all else)    0 2 4 6 | 1 3 5 7 | 8 10 12 14 | 9 11 13 15

#extension GL_EXT_spirv_intrinsics : require
// OpSDotKHR of packed words (format 0), which glslang 13 has no function for.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int packed_dot(uint a, uint b, spirv_literal int format);

int dot4(uint a, uint b) { return packed_dot(a, b, 0); }

#if defined(W_Q8_0)
#define LESS 0.0
uvec4 dot_words(Chunk c) { return c.q; }
#else
const uint EACH = 0x01010101u;
#if defined(W_Q6_K)
#define LESS 32.0
#elif defined(W_Q5_0)
#define LESS 16.0
#elif defined(W_Q4_0)
#define LESS 8.0
#elif defined(W_Q3_K)
#define LESS 4.0
#else
#define LESS 0.0
#endif

uvec4 dot_words(Chunk c) {
#ifdef HAS_NIBBLES
    uvec4 words = uvec4(c.q.x, c.q.x >> 4, c.q.y, c.q.y >> 4) & (15u * EACH);
#else
    uvec4 words = uvec4(0u);
#endif
#ifdef HAS_PAIRS
    // Columns 0 2 8 10, 4 6 12 14, 1 3 9 11, 5 7 13 15.
    uvec4 pairs = uvec4(c.pairs, c.pairs >> 2, c.pairs >> 4, c.pairs >> 6) & (3u * EACH);
    pairs = uvec4(
        (pairs.x & 0xFFFFu) | (pairs.y << 16), (pairs.z & 0xFFFFu) | (pairs.w << 16),
        (pairs.x >> 16) | (pairs.y & 0xFFFF0000u), (pairs.z >> 16) | (pairs.w & 0xFFFF0000u));
#ifdef HAS_NIBBLES
    words |= pairs << 4;
#else
    words = pairs;
#endif
#endif
#ifdef HAS_BITS
    uint bits = (c.bits & 0xFFFFu) | ((c.bits >> 1) << 16);
#ifdef HAS_PAIRS
    words |= uvec4(bits << 2, bits >> 2, bits, bits >> 4) & (4u * EACH);
#else
    words |= uvec4(bits << 4, bits, bits << 2, bits >> 2) & (16u * EACH);
#endif
#endif
    return words;
}
#endif
