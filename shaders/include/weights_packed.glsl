// Chunks of the formats with fewer than 8 bits: planes of 4, 2 and 1 bits a column, and their scales.
// Layouts: vkbackend/planes.py, quants.py, k_quants.py; interface: weights.glsl.

layout(binding = 0) readonly buffer WeightPairs { uvec2 w_pairs[]; };

#if defined(W_Q4_1) || defined(W_Q5_1) || defined(W_Q4_K) || defined(W_Q5_K) || defined(W_Q2_K)
#define HAS_OFFSET
#endif

struct Chunk {
#if !defined(W_Q2_K) && !defined(W_Q3_K)
    uvec2 q;  // 16 columns of 4 bits
#endif
#if defined(W_Q2_K) || defined(W_Q3_K) || defined(W_Q6_K)
    uint pairs;  // 16 columns of 2 bits
#endif
#if defined(W_Q5_0) || defined(W_Q5_1) || defined(W_Q5_K) || defined(W_Q3_K)
    uint bits;  // 16 columns of 1 bit in the low half
#endif
    float factor;
#ifdef HAS_OFFSET
    float offset;
#endif
};

// ---- loads. Rows of planes of quants are padded to 16 bytes; a row has a multiple of 32 columns.

uvec2 load_nibbles(uint plane, uint n_in, uint row, uint chunk) { return w_pairs[plane / 2u + row * (n_in / 16u) + chunk]; }

// For formats with blocks of 256 columns: their rows need no padding.
uint load_pairs(uint plane, uint n_in, uint row, uint chunk) { return w_words[plane + row * (n_in / 16u) + chunk]; }

uint load_bits(uint plane, uint n_in, uint row, uint chunk) {
    uint pitch = (n_in / 32u + 3u) & ~3u;
    return w_words[plane + row * pitch + chunk / 2u] >> (chunk % 2u * 16u);  // what is above 16 bits is masked later
}

float load_half(uint plane, uint n_in, uint row, uint chunk) {  // one f16 for each 32 columns
    return f16_at(plane, row * ((n_in / 32u + 1u) & ~1u) + chunk / 2u);
}

vec2 load_halves(uint plane, uint n_in, uint row, uint chunk) {  // two f16 for each 32 columns
    return unpackHalf2x16(w_words[plane + row * (n_in / 32u) + chunk / 2u]);
}

// The first word of a K-scales record: 4 words of small numbers and one of d and dmin for each 256 columns.
uint k_record(uint plane, uint n_in, uint row, uint chunk) { return plane + (row * (n_in / 256u) + chunk / 16u) * 5u; }

int signed_byte(uint first_word, uint i) {
    return bitfieldExtract(int(w_words[first_word + i / 4u]), int(i % 4u * 8u), 8);
}

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
#if !defined(W_Q2_K) && !defined(W_Q3_K)
    c.q = load_nibbles(planes.x, n_in, row, chunk);
#else
    c.pairs = load_pairs(planes.x, n_in, row, chunk);
#endif
#if defined(W_Q5_0) || defined(W_Q5_1) || defined(W_Q5_K) || defined(W_Q3_K)
    c.bits = load_bits(planes.y, n_in, row, chunk);
    uint scales = planes.z;
#elif defined(W_Q6_K)
    c.pairs = load_pairs(planes.y, n_in, row, chunk);
    uint scales = planes.z;
#else
    uint scales = planes.y;
#endif
#if defined(W_Q4_0) || defined(W_Q5_0) || defined(W_IQ4_NL)
    c.factor = load_half(scales, n_in, row, chunk);
#elif defined(W_Q4_1) || defined(W_Q5_1)
    vec2 d = load_halves(scales, n_in, row, chunk);
    c.factor = d.x;
    c.offset = -d.y;
#elif defined(W_Q4_K) || defined(W_Q5_K)
    uint record = k_record(scales, n_in, row, chunk);
    uint small = w_words[record + chunk % 16u / 4u] >> (chunk / 2u % 2u * 16u);
    vec2 d = unpackHalf2x16(w_words[record + 4u]);
    c.factor = d.x * float(small & 0xFFu);
    c.offset = d.y * float((small >> 8) & 0xFFu);
#elif defined(W_Q2_K)
    uint record = k_record(scales, n_in, row, chunk);
    uint small = w_words[record + chunk % 16u / 4u] >> (chunk % 4u * 8u);
    vec2 d = unpackHalf2x16(w_words[record + 4u]);
    c.factor = d.x * float(small & 15u);
    c.offset = d.y * float((small >> 4) & 15u);
#elif defined(W_Q6_K) || defined(W_Q3_K)
    uint record = k_record(scales, n_in, row, chunk);
    c.factor = unpackHalf2x16(w_words[record + 4u]).x * float(signed_byte(record, chunk % 16u));
#elif defined(W_IQ4_XS)
    uint record = scales + (row * (n_in / 256u) + chunk / 16u) * 3u;
    c.factor = unpackHalf2x16(w_words[record + 2u]).x * float(signed_byte(record, chunk % 16u / 2u));
#elif defined(W_MXFP4)
    uint block = chunk / 2u;
    uint e = (w_words[scales + row * ((n_in / 32u + 3u) / 4u) + block / 4u] >> (block % 4u * 8u)) & 0xFFu;
    c.factor = uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
#endif
    return c;
}

// ---- unpacking. Whatever its plane, a field of column 4 i + k comes to bit 4 k (+ 2 or 4) with one shift.

uint nibbles_of(uvec2 q, uint i) { return (i < 2u ? q.x : q.y) >> (i % 2u * 16u); }

uint pairs_of(uint pairs, uint i) { return pairs >> (i / 2u * 16u + i % 2u * 2u); }

uint bits_of(uint bits, uint i, uint to) { return (bits << to) >> i; }

// Fields of up to 7 bits at bits 0, 4, 8, 12 as floats, less a small number. Instead of shifts and conversions, which GPUs
// have few units for: ORed into the mantissa of 2^23, a field stands for 2^23 + field * 16^k, and one multiply-add takes
// both away again. All of it is exact.
vec4 fields(uvec4 masked, float less) {
    return fma(
        uintBitsToFloat(masked | 0x4B000000u),
        vec4(1.0, 1.0 / 16.0, 1.0 / 256.0, 1.0 / 4096.0),
        vec4(-8388608.0 - less, -524288.0 - less, -32768.0 - less, -2048.0 - less));
}

const uvec4 AT = uvec4(1u, 16u, 256u, 4096u);

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
