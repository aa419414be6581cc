#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// The whole gated-delta-net mixer between its two projections: causal conv + SiLU, L2 norm of q and k, gates, delta
// rule, gated RMS norm. One workgroup per (sequence, v head), one invocation per state row, tokens in order: nothing
// depends on how the tokens were split into batches. State and conv columns are indexed by position (docs/design.md).
layout(constant_id = 0) const uint DK = 128u;
const uint KERNEL_MAX = 8u;

layout(local_size_x = 128) in;
layout(binding = 0) buffer Projection { float p[]; };
layout(binding = 1) readonly buffer Params { float w[]; };
layout(binding = 2) readonly buffer Step { int step_values[]; };
layout(binding = 3) buffer ConvRing { float conv_ring[]; };
layout(binding = 4) buffer StateRing { vec4 state_ring[]; };
layout(binding = 5) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint qkv_at; uint z_at; uint alpha_at; uint beta_at; uint p_row;
    uint conv_w_at; uint dt_at; uint a_at; uint norm_at; uint step_at; uint step_row;
    uint conv_ring_at; uint n_columns; uint state_ring_at; uint n_slots;
    uint y_at; uint n_tokens; uint n_k_heads; uint n_v_heads; uint dv; uint kernel; float eps; uint flags;
} push;  // flags: 1 grouped v heads, 2 write the conv ring here

shared vec4 k_shared[2u * DK / 4u];
shared vec4 q_shared[2u * DK / 4u];

#include "delta_rule.glsl"

float silu(float x) { return x / (1.0 + exp(-x)); }

// One channel of the conv, with its last kernel - 1 raw columns in registers (newest last).
struct Tap { float past[KERNEL_MAX - 1u]; };

void load_past(out Tap tap, uint channel, uint slot, uint n_past, uint conv_dim) {
    for (uint j = 0u; j + 1u < push.kernel; ++j) {
        uint back = push.kernel - 1u - j;
        float x = 0.0;
        if (back <= n_past) {
            uint column = (n_past - back) % push.n_columns;
            x = conv_ring[push.conv_ring_at + (slot * push.n_columns + column) * conv_dim + channel];
        }
        tap.past[j] = x;
    }
}

float convolve(inout Tap tap, uint channel, float x) {
    uint at = push.conv_w_at + channel * push.kernel;
    float sum = 0.0;
    for (uint j = 0u; j + 1u < push.kernel; ++j) { sum = fma(tap.past[j], w[at + j], sum); }
    sum = fma(x, w[at + push.kernel - 1u], sum);
    for (uint j = 0u; j + 2u < push.kernel; ++j) { tap.past[j] = tap.past[j + 1u]; }
    if (push.kernel > 1u) { tap.past[push.kernel - 2u] = x; }
    return silu(sum);
}

void main() {
    uint me = gl_LocalInvocationIndex;
    uint s = gl_WorkGroupID.x / push.n_v_heads, head = gl_WorkGroupID.x % push.n_v_heads;
    uint n_past = uint(step_values[push.step_at + s]), slot = uint(step_values[push.step_at + push.step_row + s]);
    uint share = push.n_v_heads / push.n_k_heads;
    bool grouped = (push.flags & 1u) != 0u;
    uint k_head = grouped ? head / share : head % push.n_k_heads;
    bool owns_k_head = grouped ? head % share == 0u : head < push.n_k_heads;
    bool writes_ring = (push.flags & 2u) != 0u;
    uint key_dim = push.n_k_heads * DK, conv_dim = 2u * key_dim + push.n_v_heads * push.dv;
    uint q_channel = k_head * DK + me, k_channel = key_dim + q_channel, v_channel = 2u * key_dim + head * push.dv + me;
    bool has_k = me < DK, has_v = me < push.dv;

    Tap q_tap, k_tap, v_tap;
    if (has_k) {
        load_past(q_tap, q_channel, slot, n_past, conv_dim);
        load_past(k_tap, k_channel, slot, n_past, conv_dim);
    }
    if (has_v) { load_past(v_tap, v_channel, slot, n_past, conv_dim); }

    uint slot_words4 = push.n_v_heads * push.dv * DK / 4u;
    uint row4 = (head * push.dv + min(me, push.dv - 1u)) * (DK / 4u);
    uint ring4 = push.state_ring_at / 4u + slot * push.n_slots * slot_words4 + row4;
    [[unroll]] for (uint i = 0u; i < DK / 4u; ++i) { state[i] = vec4(0.0); }
    if (n_past > 0u) {
        uint at = ring4 + (n_past - 1u) % push.n_slots * slot_words4;
        [[unroll]] for (uint i = 0u; i < DK / 4u; ++i) { state[i] = state_ring[at + i]; }
    }
    float rate = w[push.a_at + head], bias = w[push.dt_at + head];
    float norm_w = has_v ? w[push.norm_at + me] : 0.0;

    for (uint t = 0u; t < push.n_tokens; ++t) {
        uint row = s * push.n_tokens + t;
        uint base = row * push.p_row;
        uint half_at = (t & 1u) * (DK / 4u);
        uint position = n_past + t;
        bool keep_column = writes_ring && t + push.n_columns >= push.n_tokens;
        uint column_at = push.conv_ring_at + (slot * push.n_columns + position % push.n_columns) * conv_dim;
        float v = 0.0;
        if (has_k) {
            float q_raw = p[push.qkv_at + base + q_channel], k_raw = p[push.qkv_at + base + k_channel];
            q_shared[half_at + me / 4u][me % 4u] = convolve(q_tap, q_channel, q_raw);
            k_shared[half_at + me / 4u][me % 4u] = convolve(k_tap, k_channel, k_raw);
            if (keep_column && owns_k_head) {
                conv_ring[column_at + q_channel] = q_raw;
                conv_ring[column_at + k_channel] = k_raw;
            }
        }
        if (has_v) {
            float v_raw = p[push.qkv_at + base + v_channel];
            v = convolve(v_tap, v_channel, v_raw);
            if (keep_column) { conv_ring[column_at + v_channel] = v_raw; }
        }
        barrier();
        // Every invocation sums the squares itself: cheaper than the barriers of a shared sum.
        vec4 kk = vec4(0.0), qq = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < DK / 4u; ++i) {
            vec4 k = k_shared[half_at + i], q = q_shared[half_at + i];
            kk = fma(k, k, kk);
            qq = fma(q, q, qq);
        }
        float k_scale = inversesqrt(strands(kk) + push.eps);
        float q_scale = inversesqrt(strands(qq) + push.eps) * inversesqrt(float(DK));
        float x = p[push.alpha_at + base + head] + bias;
        float softplus = max(x, 0.0) + log(1.0 + exp(-abs(x)));
        float beta = 1.0 / (1.0 + exp(-p[push.beta_at + base + head]));
        float o = delta_step(half_at, exp(softplus * rate), v, beta, k_scale, q_scale);
        if (has_v && t + push.n_slots >= push.n_tokens) {
            uint at = ring4 + position % push.n_slots * slot_words4;
            [[unroll]] for (uint i = 0u; i < DK / 4u; ++i) { state_ring[at + i] = state[i]; }
        }
        float mean = workgroup_add(has_v ? o * o : 0.0) / float(push.dv);
        if (has_v) {
            float z = p[push.z_at + base + head * push.dv + me];
            y[push.y_at + (row * push.n_v_heads + head) * push.dv + me] = o * inversesqrt(mean + push.eps) * norm_w * silu(z);
        }
    }
}
