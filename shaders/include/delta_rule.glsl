// The gated delta rule for one state row per invocation.
//
// The including kernel defines DK (head size, a constant), fills k_shared and q_shared (vec4[DK / 4]) for a token, and
// loads and stores `state`: row r of S [dv, dk]. Every sum runs over dk in order, in four strands, whatever the batch.
//
//   S *= decay; delta = beta * (v - S k); S += delta k; o = S q

float strands(vec4 x) { return (x.x + x.y) + (x.z + x.w); }

// With k and q not yet normalised: k_scale and q_scale are applied where they enter.
vec4 state[DK / 4u];

float delta_step(uint shared_at, float decay, float v, float beta, float k_scale, float q_scale) {
    vec4 sum = vec4(0.0);
    [[unroll]] for (uint i = 0u; i < DK / 4u; ++i) {
#ifdef KDA
        state[i] *= decay_shared[shared_at + i];
#else
        state[i] *= decay;
#endif
        sum = fma(state[i], k_shared[shared_at + i], sum);
    }
    float delta = beta * fma(-strands(sum), k_scale, v) * k_scale;
    sum = vec4(0.0);
    [[unroll]] for (uint i = 0u; i < DK / 4u; ++i) {
        state[i] = fma(vec4(delta), k_shared[shared_at + i], state[i]);
        sum = fma(state[i], q_shared[shared_at + i], sum);
    }
    return strands(sum) * q_scale;
}
