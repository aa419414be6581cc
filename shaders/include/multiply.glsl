// Products of one piece of N_R weight rows with one row of x. The including kernel defines the constant N_R and includes
// weights.glsl; a piece is QUADS * 4 columns.

const uint QUADS = HALVES * 4u;
const uint PIECE = QUADS * 4u;

// Adds the products of the pieces w, one of each row, with v to the sums of the rows.
void multiply(Chunk w[N_R][HALVES], vec4 v[QUADS], inout float sums[N_R]) {
    [[unroll]] for (uint h = 0u; h < HALVES; ++h) {
        float part[N_R];
        precise float v_sum = 0.0;
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            vec4 x = v[h * 4u + i];
#ifdef HAS_OFFSET
            v_sum += (x.x + x.y) + (x.z + x.w);
#endif
            [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                vec4 q = unpack(w[r][h], i);
                float sum = i == 0u ? 0.0 : part[r];
                part[r] = fma(q.x, x.x, fma(q.y, x.y, fma(q.z, x.z, fma(q.w, x.w, sum))));
            }
        }
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
#ifdef HAS_OFFSET
            sums[r] += fma(part[r], w[r][h].factor, -(w[r][h].offset * v_sum));
#else
            sums[r] = fma(part[r], w[r][h].factor, sums[r]);
#endif
        }
    }
}
