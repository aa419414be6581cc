// Numbers as 16-bit integers for linear_dots.comp: 256 high + low, two signed bytes, with one scale for a chunk of 16.
//
// A row of n columns is stored as n / 4 words of low bytes, n / 4 of high ones, n / 8 with each chunk's scale and the sum of its
// integers in turns, and n / 16 with each chunk's sum of squares (where the row was scaled by a norm's weights: of
// the row before that). Bytes lie in the order that ORDER asks for, see dots.glsl.
//
// The including kernel declares `writeonly buffer ... { uint bytes[]; }` and `{ float byte_scales[]; }` over one binding.

const uint BYTES = 0u, NIBBLES = 1u;

// Columns 4 quad .. 4 quad + 3 of a row of `n` columns that begins at word `at`. Neighbours in groups of four, which have a
// chunk together, call this at the same time. `squares` is the sum of the squares of these four columns.
void store_bytes(vec4 v, float squares, uint order, uint at, uint n, uint quad, bool valid) {
    uvec4 size = floatBitsToUint(v) & 0x7FFFFFFFu;  // as integers these compare like the numbers, and NaN is largest
    uint most = max(max(size.x, size.y), max(size.z, size.w));
    most = max(most, subgroupShuffleXor(most, 1u));
    most = max(most, subgroupShuffleXor(most, 2u));
    float largest = uintBitsToFloat(most);
    float to_integer = largest > 1e-30 ? 32512.0 / largest : 0.0;
    // The low 16 bits are now the integer + 0x8080: each byte is 128 more than what it stands for.
    uvec4 u = floatBitsToUint(fma(v, vec4(to_integer), vec4(8388608.0 + 32896.0)));
    int sum = int((u.x & 0xFFFFu) + (u.y & 0xFFFFu) + (u.z & 0xFFFFu) + (u.w & 0xFFFFu)) - 4 * 32896;
    sum += subgroupShuffleXor(sum, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    squares += subgroupShuffleXor(squares, 1u);
    squares += subgroupShuffleXor(squares, 2u);
    // Two invocations make two words: one has the even columns of both, one the odd ones.
    uint even = (u.x & 0xFFu) | ((u.z & 0xFFu) << 8) | ((u.x & 0xFF00u) << 8) | ((u.z & 0xFF00u) << 16);
    uint odd = (u.y & 0xFFu) | ((u.w & 0xFFu) << 8) | ((u.y & 0xFF00u) << 8) | ((u.w & 0xFF00u) << 16);
    bool is_odd = (quad & 1u) != 0u;
    uint theirs = subgroupShuffleXor(is_odd ? even : odd, 1u);
    uint a = is_odd ? theirs : even, b = is_odd ? odd : theirs;
    uint low = (a & 0xFFFFu) | (b << 16), high = (a >> 16) | (b & 0xFFFF0000u);
    if (order == BYTES) {
        low = (even & 0xFFu) | ((odd & 0xFFu) << 8) | ((even & 0xFF00u) << 8) | ((odd & 0xFF00u) << 16);
        high = ((even >> 16) & 0xFFu) | ((odd >> 8) & 0xFF00u) | ((even >> 8) & 0xFF0000u) | (odd & 0xFF000000u);
    }
    if (!valid) { return; }
    bytes[at + quad] = low ^ 0x80808080u;
    bytes[at + n / 4u + quad] = high ^ 0x80808080u;
    if ((quad & 3u) == 0u) {
        byte_scales[at + n / 2u + quad / 2u] = largest * (1.0 / 32512.0);
        byte_scales[at + n / 2u + quad / 2u + 1u] = float(sum);
        byte_scales[at + n / 8u * 5u + quad / 4u] = squares;
    }
}
