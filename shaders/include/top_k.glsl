// The N_USED largest of N_EXPERT router logits and their softmax weights, by a whole workgroup. Every logit's rank is the
// number of logits before it: no loop of dependent steps. The including kernel declares `float logits[]` and the constants
// N_EXPERT and N_USED (at most LOCAL_SIZE).

const uint LOGIT_QUADS = (N_EXPERT + 3u) / 4u;
#define BEFORE_ALL uintBitsToFloat(0xFF800000u)  // -infinity

shared vec4 all_logits[LOGIT_QUADS];
shared float top_logits[N_USED];
shared uint top_experts[N_USED];

// Fills top_logits and top_experts, best first, from the logits that start at word `at`. Uniform control flow only.
void find_top(uint at) {
    uint me = gl_LocalInvocationIndex;
    for (uint i = me; i < LOGIT_QUADS * 4u; i += LOCAL_SIZE) {
        float logit = i < N_EXPERT ? logits[at + i] : BEFORE_ALL;
        bool is_nan = (floatBitsToUint(logit) & 0x7FFFFFFFu) > 0x7F800000u;  // isnan() may be optimised away
        all_logits[i / 4u][i % 4u] = is_nan ? BEFORE_ALL : logit;
    }
    barrier();
    for (uint i = me; i < N_EXPERT; i += LOCAL_SIZE) {
        float mine = all_logits[i / 4u][i % 4u];
        uint rank = 0u;
        for (uint q = 0u; q < LOGIT_QUADS; ++q) {
            vec4 other = all_logits[q];
            [[unroll]] for (uint j = 0u; j < 4u; ++j) {
                rank += other[j] > mine || (other[j] == mine && q * 4u + j < i) ? 1u : 0u;
            }
        }
        if (rank < N_USED) {
            top_logits[rank] = mine;
            top_experts[rank] = i;
        }
    }
    barrier();
}

// The weight of the expert of one rank: its part of the softmax over the chosen logits.
float top_weight(uint rank) {
    float sum = 0.0;
    for (uint i = 0u; i < N_USED; ++i) { sum += exp(top_logits[i] - top_logits[0]); }
    return exp(top_logits[rank] - top_logits[0]) / sum;
}
