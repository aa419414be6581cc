// Sine and cosine of an angle given in turns as a 32-bit binary fraction (0x40000000 is a quarter turn).
//
// Vulkan promises only 2^-11 for sin and cos, and position * frequency in float32 is off by radians at long
// contexts. Fixed point wraps exactly, and on an eighth of a turn short polynomials reach float32 precision.

vec2 cos_sin_turns(uint turns) {
    uint quadrant = (turns + 0x20000000u) >> 30;
    float x = float(int(turns - (quadrant << 30))) * (6.283185307179586 / 4294967296.0);  // in [-pi/4, pi/4]
    float x2 = x * x;
    float s = x * fma(x2, fma(x2, fma(x2, fma(x2, 2.7557319e-6, -1.9841270e-4), 8.3333333e-3), -0.16666667), 1.0);
    float c = fma(x2, fma(x2, fma(x2, fma(x2, 2.4801587e-5, -1.3888889e-3), 4.1666667e-2), -0.5), 1.0);
    vec2 v = (quadrant & 1u) == 0u ? vec2(c, s) : vec2(-s, c);
    return (quadrant & 2u) == 0u ? v : -v;
}

// position * frequency modulo one turn; the frequency in turns per position as a 64-bit fraction (high, low word).
uint turns_at(uint position, uint high, uint low) {
    uint carry, unused;
    umulExtended(position, low, carry, unused);
    return position * high + carry;
}
