// Decoding of packed weight rows, 16 columns (a chunk) at a time. Planes: vkbackend/quants.py.
//
// The including kernel declares binding 0 as the weight buffer, twice: `uint w_words[]` and `uvec4 w_quads[]`, and
// defines one W_<FORMAT>. `planes` holds the first word of each plane; rows follow each other in a plane.
//
//   float load_chunk(uvec3 planes, uint n_in, uint row, uint chunk, out vec4 w[4])
//
// returns the factor that belongs to the whole chunk: the weights are w times it.

uint half_at(uint plane, uint index) {
    uint word = w_words[plane + index / 2u];
    return (index & 1u) == 0u ? word & 0xFFFFu : word >> 16;
}

float f16_at(uint plane, uint index) { return unpackHalf2x16(half_at(plane, index)).x; }

vec4 signed_bytes(uint word) {
    int w = int(word);
    return vec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 16, 8), bitfieldExtract(w, 24, 8));
}

#if defined(W_F32)

float load_chunk(uvec3 planes, uint n_in, uint row, uint chunk, out vec4 w[4]) {
    uint at = (planes.x + row * ((n_in + 3u) & ~3u)) / 4u + chunk * 4u;
    [[unroll]] for (uint i = 0u; i < 4u; ++i) { w[i] = uintBitsToFloat(w_quads[at + i]); }
    return 1.0;
}

#elif defined(W_F16)

float load_chunk(uvec3 planes, uint n_in, uint row, uint chunk, out vec4 w[4]) {
    uint at = planes.x / 4u + row * ((n_in + 7u) / 8u) + chunk * 2u;
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        uvec4 q = w_quads[at + i];
        w[2u * i] = vec4(unpackHalf2x16(q.x), unpackHalf2x16(q.y));
        w[2u * i + 1u] = vec4(unpackHalf2x16(q.z), unpackHalf2x16(q.w));
    }
    return 1.0;
}

#elif defined(W_BF16)

float load_chunk(uvec3 planes, uint n_in, uint row, uint chunk, out vec4 w[4]) {
    uint at = planes.x / 4u + row * ((n_in + 7u) / 8u) + chunk * 2u;
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        uvec4 q = w_quads[at + i];
        uvec4 low = q << 16, high = q & 0xFFFF0000u;
        w[2u * i] = uintBitsToFloat(uvec4(low.x, high.x, low.y, high.y));
        w[2u * i + 1u] = uintBitsToFloat(uvec4(low.z, high.z, low.w, high.w));
    }
    return 1.0;
}

#elif defined(W_Q8_0)

float load_chunk(uvec3 planes, uint n_in, uint row, uint chunk, out vec4 w[4]) {
    uvec4 q = w_quads[planes.x / 4u + row * (n_in / 16u) + chunk];
    uint scale_row = row * ((n_in / 32u + 1u) & ~1u);
    [[unroll]] for (uint i = 0u; i < 4u; ++i) { w[i] = signed_bytes(q[i]); }
    return f16_at(planes.y, scale_row + chunk / 2u);
}

#endif
