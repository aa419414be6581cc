// Chunks of the formats with fewer than 8 bits: planes of 4, 2 and 1 bits a column and their scales.
// Layouts: vkbackend/quants.py and vkbackend/k_quants.py; interface: weights.glsl.

#if defined(W_Q4_1) || defined(W_Q5_1) || defined(W_Q4_K) || defined(W_Q5_K) || defined(W_Q2_K)
#define HAS_OFFSET
#endif

struct Chunk {
    uvec2 q;       // 16 columns of 4 bits, or (in x) of 2
    uint h;        // their bits above: 16 of 1 bit, or of 2
    float factor;
#ifdef HAS_OFFSET
    float offset;
#endif
};

// Words of a row: of a plane of 4, 2, 1 bits a column (rows padded to 16 bytes), of f16 per 32 columns.
uint pitch4(uint n_in) { return n_in / 8u; }
uint pitch2(uint n_in) { return (n_in / 4u + 15u) / 16u * 4u; }
uint pitch1(uint n_in) { return (n_in / 8u + 15u) / 16u * 4u; }
uint half_pitch(uint n_in) { return (n_in / 32u + 1u) & ~1u; }

uvec2 load4(uint plane, uint n_in, uint row, uint chunk) {
    uint at = plane + row * pitch4(n_in) + chunk * 2u;
    return uvec2(w_words[at], w_words[at + 1u]);
}

uint load2(uint plane, uint n_in, uint row, uint chunk) { return w_words[plane + row * pitch2(n_in) + chunk]; }

uint load1(uint plane, uint n_in, uint row, uint chunk) {
    return w_words[plane + row * pitch1(n_in) + chunk / 2u] >> (chunk % 2u * 16u) & 0xFFFFu;
}

uvec4 nibbles(uvec2 q, uint i) {
    uint word = i < 2u ? q.x : q.y;
    return uvec4(word, word >> 4, word >> 8, word >> 12) >> (i % 2u * 16u) & 15u;
}

uvec4 pairs(uint word, uint i) { return uvec4(word, word >> 2, word >> 4, word >> 6) >> (i * 8u) & 3u; }

uvec4 bits(uint word, uint i) { return uvec4(word, word >> 1, word >> 2, word >> 3) >> (i * 4u) & 1u; }

int signed_byte(uint first_word, uint i) { return bitfieldExtract(int(w_words[first_word + i / 4u]), int(i % 4u * 8u), 8); }

#if defined(W_Q4_0) || defined(W_IQ4_NL)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
    c.factor = f16_at(planes.y, row * half_pitch(n_in) + chunk / 2u);
    return c;
}

#elif defined(W_Q4_1)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
    vec2 both = unpackHalf2x16(w_words[planes.y + row * (n_in / 32u) + chunk / 2u]);
    c.factor = both.x;
    c.offset = -both.y;
    return c;
}

#elif defined(W_Q5_0)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
    c.h = load1(planes.y, n_in, row, chunk);
    c.factor = f16_at(planes.z, row * half_pitch(n_in) + chunk / 2u);
    return c;
}

#elif defined(W_Q5_1)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
    c.h = load1(planes.y, n_in, row, chunk);
    vec2 both = unpackHalf2x16(w_words[planes.z + row * (n_in / 32u) + chunk / 2u]);
    c.factor = both.x;
    c.offset = -both.y;
    return c;
}

#elif defined(W_Q4_K) || defined(W_Q5_K)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
#ifdef W_Q5_K
    c.h = load1(planes.y, n_in, row, chunk);
    uint scales = planes.z;
#else
    uint scales = planes.y;
#endif
    uint record = scales + (row * (n_in / 256u) + chunk / 16u) * 5u, group = chunk % 16u / 2u;
    uint both = w_words[record + group / 2u] >> (group % 2u * 16u);
    vec2 d = unpackHalf2x16(w_words[record + 4u]);
    c.factor = d.x * float(both & 0xFFu);
    c.offset = d.y * float(both >> 8 & 0xFFu);
    return c;
}

#elif defined(W_Q6_K)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
    c.h = load2(planes.y, n_in, row, chunk);
    uint record = planes.z + (row * (n_in / 256u) + chunk / 16u) * 5u;
    c.factor = unpackHalf2x16(w_words[record + 4u]).x * float(signed_byte(record, chunk % 16u));
    return c;
}

#elif defined(W_Q2_K)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q.x = load2(planes.x, n_in, row, chunk);
    uint record = planes.y + (row * (n_in / 256u) + chunk / 16u) * 5u, group = chunk % 16u;
    uint both = w_words[record + group / 4u] >> (group % 4u * 8u);
    vec2 d = unpackHalf2x16(w_words[record + 4u]);
    c.factor = d.x * float(both & 15u);
    c.offset = d.y * float(both >> 4 & 15u);
    return c;
}

#elif defined(W_Q3_K)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q.x = load2(planes.x, n_in, row, chunk);
    c.h = load1(planes.y, n_in, row, chunk);
    uint record = planes.z + (row * (n_in / 256u) + chunk / 16u) * 5u;
    c.factor = unpackHalf2x16(w_words[record + 4u]).x * float(signed_byte(record, chunk % 16u));
    return c;
}

#elif defined(W_IQ4_XS)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
    uint record = planes.y + (row * (n_in / 256u) + chunk / 16u) * 3u;
    c.factor = unpackHalf2x16(w_words[record + 2u]).x * float(signed_byte(record, chunk % 16u / 2u));
    return c;
}

#elif defined(W_MXFP4)

Chunk load_chunk(uvec3 planes, uint n_in, uint row, uint chunk) {
    Chunk c;
    c.q = load4(planes.x, n_in, row, chunk);
    uint block = chunk / 2u, pitch = (n_in / 32u + 3u) / 4u;
    uint e = w_words[planes.y + row * pitch + block / 4u] >> (block % 4u * 8u) & 0xFFu;
    c.factor = uintBitsToFloat(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
    return c;
}

#endif

#if defined(W_IQ4_NL) || defined(W_IQ4_XS)
const float VALUES[16] = float[](
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0);
#elif defined(W_MXFP4)
const float VALUES[16] = float[](0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0);
#endif

vec4 unpack(Chunk c, uint i) {
#if defined(W_Q4_0)
    return vec4(nibbles(c.q, i)) - 8.0;
#elif defined(W_Q4_1) || defined(W_Q4_K)
    return vec4(nibbles(c.q, i));
#elif defined(W_Q5_0)
    return vec4(nibbles(c.q, i) | bits(c.h, i) << 4) - 16.0;
#elif defined(W_Q5_1) || defined(W_Q5_K)
    return vec4(nibbles(c.q, i) | bits(c.h, i) << 4);
#elif defined(W_Q6_K)
    return vec4(nibbles(c.q, i) | pairs(c.h, i) << 4) - 32.0;
#elif defined(W_Q2_K)
    return vec4(pairs(c.q.x, i));
#elif defined(W_Q3_K)
    return vec4(pairs(c.q.x, i) | bits(c.h, i) << 2) - 4.0;
#else
    uvec4 n = nibbles(c.q, i);
    return vec4(VALUES[n.x], VALUES[n.y], VALUES[n.z], VALUES[n.w]);
#endif
}
