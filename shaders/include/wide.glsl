// Numbers of 64 bits as (low, high) words, and random numbers.

uvec2 add(uvec2 a, uvec2 b) {
    uint low = a.x + b.x;
    return uvec2(low, a.y + b.y + (low < a.x ? 1u : 0u));
}

uvec2 subtract(uvec2 a, uvec2 b) { return uvec2(a.x - b.x, a.y - b.y - (a.x < b.x ? 1u : 0u)); }

bool less(uvec2 a, uvec2 b) { return a.y < b.y || (a.y == b.y && a.x < b.x); }

// a / 2^n, rounded down.
uvec2 shift_right(uvec2 a, uint n) {
    if (n == 0u) { return a; }
    if (n >= 32u) { return uvec2(n < 64u ? a.y >> n - 32u : 0u, 0u); }
    return uvec2(a.x >> n | a.y << 32u - n, a.y >> n);
}

uvec2 product(uint a, uint b) {
    uint high, low;
    umulExtended(a, b, high, low);
    return uvec2(low, high);
}

// a * b / 2^64, rounded down.
uvec2 fraction(uvec2 a, uvec2 b) {
    uvec2 low = product(a.x, b.x), high = product(a.y, b.y);
    uvec2 first = product(a.x, b.y), second = product(a.y, b.x);
    uvec2 middle = add(uvec2(low.y, 0u), uvec2(first.x, 0u));
    middle = add(middle, uvec2(second.x, 0u));
    uvec2 sum = add(high, uvec2(first.y, 0u));
    sum = add(sum, uvec2(second.y, 0u));
    return add(sum, uvec2(middle.y, 0u));
}

// The greatest number below a * p / 2^32.
uvec2 before_fraction(uvec2 a, uint p) {
    uvec2 low = product(a.x, p), high = product(a.y, p);
    uvec2 floored = add(high, uvec2(low.y, 0u));
    return low.x == 0u ? subtract(floored, uvec2(1u, 0u)) : floored;
}

// 64 random bits of a seed and a position: Philox-4x32-10 (Salmon et al. 2011).
uvec2 random_bits(uvec2 key, uint position) {
    uvec4 c = uvec4(position, 0u, 0u, 0u);
    for (uint i = 0u; i < 10u; ++i) {
        uvec2 p = product(0xD2511F53u, c.x), q = product(0xCD9E8D57u, c.z);
        c = uvec4(q.y ^ c.y ^ key.x, q.x, p.y ^ c.w ^ key.y, p.x);
        key += uvec2(0x9E3779B9u, 0xBB67AE85u);
    }
    return c.xy;
}
