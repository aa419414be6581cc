// The part of rows.glsl that depends on the format of the weights: one chunk of N_R weight rows with TOKENS rows of x.
// Included once for each format of a kernel; ADD_CHUNK names the function, CHUNK and
// UNPACK what weights.glsl has for the format.

void ADD_CHUNK(Product p, CHUNK w[N_R], uint chunk, inout float sums[N_R][TOKENS], inout float squares[TOKENS]) {
    float part[N_R][TOKENS];
    float x_sum[TOKENS];
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        vec4 q[N_R];
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { q[r] = UNPACK(w[r], i); }
        vec4 norm = vec4(1.0);
        if (HAS_NORM(p)) { norm = norm_quad(p.norm_at / 4u + chunk * 4u + i); }
        [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
            vec4 x = x_quad(p, t, chunk * 4u + i), v = x;
            if (HAS_NORM(p)) {
                squares[t] = fma(x.x, x.x, fma(x.y, x.y, fma(x.z, x.z, fma(x.w, x.w, squares[t]))));
                v *= norm;
            }
#ifdef HAS_OFFSET
            // Not the sum of v: x * norm + ... may be contracted by a compiler, here and not there.
            x_sum[t] = fma(x.x, norm.x, fma(x.y, norm.y, fma(x.z, norm.z, fma(x.w, norm.w, i == 0u ? 0.0 : x_sum[t]))));
#endif
            [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                float before = i == 0u ? 0.0 : part[r][t];
                part[r][t] = fma(q[r].x, v.x, fma(q[r].y, v.y, fma(q[r].z, v.z, fma(q[r].w, v.w, before))));
            }
        }
    }
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        float scale = HAS_GROUPS(p) ? GROUP_SCALE(p, t, chunk * 16u) : 1.0;
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            precise float factor = w[r].factor * scale;
#ifdef HAS_OFFSET
            // Never a sum of two products: which of the two a compiler contracts is its choice.
            precise float offset = w[r].offset * scale;
            sums[r][t] = fma(-offset, x_sum[t], sums[r][t]);
#endif
            sums[r][t] = fma(part[r][t], factor, sums[r][t]);
        }
    }
}
