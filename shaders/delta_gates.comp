#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// One invocation per (row, head).
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Alpha { float alpha[]; };
layout(binding = 1) readonly buffer Beta { float beta[]; };
layout(binding = 2) readonly buffer DtBias { float dt_bias[]; };
layout(binding = 3) readonly buffer A { float a[]; };
layout(binding = 4) buffer Decay { float decay[]; };
layout(binding = 5) buffer Rate { float rate[]; };
layout(push_constant) uniform Push {
    uint alpha_at; uint alpha_row; uint beta_at; uint beta_row; uint dt_at; uint a_at; uint decay_at; uint rate_at;
    uint n_heads; uint n;
} push;

void main() {
    uint i = WORKGROUP_INDEX * LOCAL_SIZE + gl_LocalInvocationIndex;
    if (i >= push.n) { return; }
    uint row = i / push.n_heads, head = i % push.n_heads;
    float x = alpha[push.alpha_at + row * push.alpha_row + head] + dt_bias[push.dt_at + head];
    float softplus = max(x, 0.0) + log(1.0 + exp(-abs(x)));  // exp never overflows
    decay[push.decay_at + i] = softplus * a[push.a_at + head];
    rate[push.rate_at + i] = 1.0 / (1.0 + exp(-beta[push.beta_at + row * push.beta_row + head]));
}
