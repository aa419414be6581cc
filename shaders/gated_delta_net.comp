#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// The gated delta rule over the tokens of one (sequence, v head), one invocation per state row. Writes the attention
// output and, after each of the last SNAPSHOTS tokens, the state to its snapshot slot.
layout(constant_id = 0) const uint DK = 128u;

layout(local_size_x = 128) in;
layout(binding = 0) readonly buffer Q { float q[]; };
layout(binding = 1) readonly buffer K { float k[]; };
layout(binding = 2) readonly buffer V { float v[]; };
layout(binding = 3) readonly buffer G { float g[]; };
layout(binding = 4) readonly buffer Beta { float beta[]; };
layout(binding = 5) readonly buffer State { float state_in[]; };
layout(binding = 6) buffer Out { float result[]; };
layout(push_constant) uniform Push {
    uint q_at; uint q_seq; uint q_token; uint q_head; uint k_at; uint k_seq; uint k_token; uint k_head;
    uint v_at; uint v_seq; uint v_token; uint v_head; uint g_at; uint g_seq; uint g_token; uint g_head;
    uint beta_at; uint beta_seq; uint beta_token; uint beta_head; uint state_at; uint state_seq;
    uint out_at; uint n_seqs; uint n_seqs_qk; uint n_tokens; uint n_heads; uint n_heads_qk; uint snapshots;
} push;

shared vec4 k_shared[2u * DK / 4u];
shared vec4 q_shared[2u * DK / 4u];
#ifdef KDA
shared vec4 decay_shared[2u * DK / 4u];
#endif

#include "delta_rule.glsl"

void main() {
    uint me = gl_LocalInvocationIndex;
    uint s = WORKGROUP_INDEX / push.n_heads, head = WORKGROUP_INDEX % push.n_heads;
    if (s >= push.n_seqs) { return; }
    uint s_qk = s / (push.n_seqs / push.n_seqs_qk), head_qk = head % push.n_heads_qk;
    uint q_base = push.q_at + s_qk * push.q_seq + head_qk * push.q_head;
    uint k_base = push.k_at + s_qk * push.k_seq + head_qk * push.k_head;
    uint row = min(me, DK - 1u);
    uint head_words = DK * DK;
    [[unroll]] for (uint i = 0u; i < DK / 4u; ++i) {
        uint at = push.state_at + s * push.state_seq + head * head_words + row * DK + 4u * i;
        state[i] = vec4(state_in[at], state_in[at + 1u], state_in[at + 2u], state_in[at + 3u]);
    }
    uint snapshots_at = push.out_at + push.n_seqs * push.n_tokens * push.n_heads * DK;
    for (uint t = 0u; t < push.n_tokens; ++t) {
        uint half_at = (t & 1u) * (DK / 4u);  // two buffers: one barrier per token is enough
        uint g_token_at = push.g_at + s * push.g_seq + t * push.g_token + head * push.g_head;
        if (me < DK) {
            q_shared[half_at + me / 4u][me % 4u] = q[q_base + t * push.q_token + me];
            k_shared[half_at + me / 4u][me % 4u] = k[k_base + t * push.k_token + me];
#ifdef KDA
            decay_shared[half_at + me / 4u][me % 4u] = exp(g[g_token_at + me]);
#endif
        }
        barrier();
        float v_row = v[push.v_at + s * push.v_seq + t * push.v_token + head * push.v_head + row];
        float rate = beta[push.beta_at + s * push.beta_seq + t * push.beta_token + head * push.beta_head];
        float o = delta_step(half_at, exp(g[g_token_at]), v_row, rate, 1.0, inversesqrt(float(DK)));
        if (me < DK) {
            result[push.out_at + ((s * push.n_tokens + t) * push.n_heads + head) * DK + me] = o;
            // Newest state in the last slot; tokens before the last SNAPSHOTS ones leave none.
            int slot = int(t) - (int(push.n_tokens) - int(push.snapshots));
            if (slot >= 0) {
                uint at = snapshots_at + ((uint(slot) * push.n_seqs + s) * push.n_heads + head) * head_words + me * DK;
                [[unroll]] for (uint i = 0u; i < DK; ++i) { result[at + i] = state[i / 4u][i % 4u]; }
            }
        }
    }
}
