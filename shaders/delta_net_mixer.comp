#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// The gated-delta-net mixer between its two projections: causal conv + SiLU, L2 norm of q and k, gates, delta rule,
// output gate. A workgroup takes ROWS state rows of one (sequence, v head), a team N_R of them, a lane every eighth vec4
// of a row; tokens in order, so nothing depends on how they were split into batches. Norms over a whole head are left to the
// next product: the sums of squares of each workgroup's rows go to `squares`. State and conv columns are indexed by
// position (docs/design.md).
layout(constant_id = 0) const uint DK = 128u;
layout(constant_id = 1) const uint TAPS = 4u;  // of the conv, at most MAX_TAPS
const uint ROWS = 32u, N_R = ROWS / TEAMS;
const uint QUADS = DK / 4u, MINE = (QUADS + LANES - 1u) / LANES;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Projection { float p[]; };
layout(binding = 1) readonly buffer Params { float w[]; };
layout(binding = 2) readonly buffer Step { int step_values[]; };
layout(binding = 3) buffer ConvRing { float conv_ring[]; };
layout(binding = 4) buffer StateRing { vec4 state_ring[]; };
layout(binding = 5) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint qkv_at; uint z_at; uint alpha_at; uint beta_at; uint p_row;
    uint conv_w_at; uint dt_at; uint a_at; uint norm_at; uint step_at; uint step_row;
    uint conv_ring_at; uint n_columns; uint state_ring_at; uint n_slots;
    uint y_at; uint squares_at; uint n_tokens; uint n_seqs; uint n_k_heads; uint n_v_heads; uint dv; uint n_parts;
    float eps; uint flags; uint first;
} push;  // flags: 1 grouped v heads, 2 write the conv ring here; tokens before `first` are done already

// Two of each, for even and odd tokens: one barrier per token is enough.
shared vec4 q_shared[2u * QUADS];
shared vec4 k_shared[2u * QUADS];
shared float v_shared[2u * ROWS];
shared float square_shared[2u * ROWS];

#include "conv_taps.glsl"

// What one invocation reads of a token.
struct Token { float q; float k; float v; float alpha; float beta; float z[N_R]; };

Token load_token(uint row, uint head, uint part, uint q_channel, uint k_channel, uint v_channel, bool has_k, bool has_v) {
    uint base = row * push.p_row;
    Token token;
    token.q = has_k ? p[push.qkv_at + base + q_channel] : 0.0;
    token.k = has_k ? p[push.qkv_at + base + k_channel] : 0.0;
    token.v = has_v ? p[push.qkv_at + base + v_channel] : 0.0;
    token.alpha = p[push.alpha_at + base + head];
    token.beta = p[push.beta_at + base + head];
    [[unroll]] for (uint r = 0u; r < N_R; ++r) {
        token.z[r] = p[push.z_at + base + head * push.dv + min(part * ROWS + TEAM * N_R + r, push.dv - 1u)];
    }
    return token;
}

float dot_in_order(vec4 a, vec4 b, float sum) {
    return fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, fma(a.w, b.w, sum))));
}

// The sum of this workgroup's squares of token row `row`; every team computes it, one lane writes.
void write_squares(uint row, uint head, uint part, uint parity) {
    float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < ROWS / LANES; ++i) { sum += square_shared[parity * ROWS + i * LANES + LANE]; }
    sum = team_add(sum);
    if (gl_LocalInvocationIndex == 0u) { y[push.squares_at + (row * push.n_v_heads + head) * push.n_parts + part] = sum; }
}

void main() {
    uint me = gl_LocalInvocationIndex;
    uint index = WORKGROUP_INDEX;
    uint part = index % push.n_parts, head = index / push.n_parts % push.n_v_heads, s = index / push.n_parts / push.n_v_heads;
    if (s >= push.n_seqs) { return; }
    uint n_past = uint(step_values[push.step_at + s]), slot = uint(step_values[push.step_at + push.step_row + s]);
    uint row0 = s * push.n_tokens;
    uint share = push.n_v_heads / push.n_k_heads;
    bool grouped = (push.flags & 1u) != 0u, writes_ring = (push.flags & 2u) != 0u;
    uint k_head = grouped ? head / share : head % push.n_k_heads;
    bool owns_k_head = part == 0u && (grouped ? head % share == 0u : head < push.n_k_heads);
    uint key_dim = push.n_k_heads * DK, conv_dim = 2u * key_dim + push.n_v_heads * push.dv;
    uint q_channel = k_head * DK + me, k_channel = key_dim + q_channel;
    uint v_channel = 2u * key_dim + head * push.dv + part * ROWS + me;
    bool has_k = me < DK, has_v = me < ROWS && part * ROWS + me < push.dv;

    Tap q_tap, k_tap, v_tap;
    if (has_k) {
        q_tap = load_tap(q_channel, slot, n_past, row0, push.first, conv_dim);
        k_tap = load_tap(k_channel, slot, n_past, row0, push.first, conv_dim);
    }
    if (has_v) { v_tap = load_tap(v_channel, slot, n_past, row0, push.first, conv_dim); }

    vec4 state[N_R][MINE];
    uint slot_quads = push.n_v_heads * push.dv * QUADS;
    uint ring = push.state_ring_at / 4u + slot * push.n_slots * slot_quads + head * push.dv * QUADS;
    uint newest = ring + (n_past + push.first + push.n_slots - 1u) % push.n_slots * slot_quads;
    float norm_w[N_R];
    [[unroll]] for (uint r = 0u; r < N_R; ++r) {
        uint row = part * ROWS + TEAM * N_R + r;
        norm_w[r] = row < push.dv ? w[push.norm_at + row] : 0.0;
        [[unroll]] for (uint i = 0u; i < MINE; ++i) {
            uint quad = LANE + i * LANES;
            state[r][i] = vec4(0.0);
            if (n_past + push.first > 0u && row < push.dv && quad < QUADS) {
                state[r][i] = state_ring[newest + row * QUADS + quad];
            }
        }
    }
    float rate = w[push.a_at + head], bias = w[push.dt_at + head];
    Token next = load_token(row0 + push.first, head, part, q_channel, k_channel, v_channel, has_k, has_v);

    for (uint t = push.first; t < push.n_tokens; ++t) {
        uint row = row0 + t, parity = t & 1u;
        Token now = next;
        uint position = n_past + t;
        bool keep_column = writes_ring && t + push.n_columns >= push.n_tokens;
        uint column_at = push.conv_ring_at + (slot * push.n_columns + position % push.n_columns) * conv_dim;
        if (has_k) {
            q_shared[parity * QUADS + me / 4u][me % 4u] = convolve(q_tap, now.q);
            k_shared[parity * QUADS + me / 4u][me % 4u] = convolve(k_tap, now.k);
            if (keep_column && owns_k_head) {
                conv_ring[column_at + q_channel] = now.q;
                conv_ring[column_at + k_channel] = now.k;
            }
        }
        if (has_v) {
            v_shared[parity * ROWS + me] = convolve(v_tap, now.v);
            if (keep_column) { conv_ring[column_at + v_channel] = now.v; }
        }
        // What the next token needs from memory is asked for while this one is worked on.
        uint row_after = min(row + 1u, row0 + push.n_tokens - 1u);
        next = load_token(row_after, head, part, q_channel, k_channel, v_channel, has_k, has_v);
        float x = now.alpha + bias;
        float decay = exp(softplus(x) * rate);
        float beta = 1.0 / (1.0 + exp(-now.beta));
        barrier();
        if (t > push.first) { write_squares(row - 1u, head, part, 1u - parity); }

        vec4 k[MINE], q[MINE];
        float kk = 0.0, qq = 0.0, sums[N_R];
        [[unroll]] for (uint i = 0u; i < MINE; ++i) {
            uint at = parity * QUADS + min(LANE + i * LANES, QUADS - 1u);
            float inside = LANE + i * LANES < QUADS ? 1.0 : 0.0;
            k[i] = k_shared[at] * inside;
            q[i] = q_shared[at] * inside;
            kk = dot_in_order(k[i], k[i], kk);
            qq = dot_in_order(q[i], q[i], qq);
        }
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            sums[r] = 0.0;
            [[unroll]] for (uint i = 0u; i < MINE; ++i) {
                state[r][i] *= decay;
                sums[r] = dot_in_order(state[r][i], k[i], sums[r]);
            }
        }
        float k_scale = inversesqrt(team_add(kk) + push.eps);
        float q_scale = inversesqrt(team_add(qq) + push.eps) * inversesqrt(float(DK));
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            float v = v_shared[parity * ROWS + TEAM * N_R + r];
            float delta = beta * fma(-team_add(sums[r]), k_scale, v) * k_scale;
            sums[r] = 0.0;
            [[unroll]] for (uint i = 0u; i < MINE; ++i) {
                state[r][i] = fma(vec4(delta), k[i], state[r][i]);
                sums[r] = dot_in_order(state[r][i], q[i], sums[r]);
            }
        }
        bool keep_state = t + push.n_slots >= push.n_tokens;
        uint state_at = ring + position % push.n_slots * slot_quads;
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            uint state_row = part * ROWS + TEAM * N_R + r;
            float o = team_add(sums[r]) * q_scale;
            if (LANE == 0u) {
                square_shared[parity * ROWS + TEAM * N_R + r] = state_row < push.dv ? o * o : 0.0;
                if (state_row < push.dv) {
                    y[push.y_at + (row * push.n_v_heads + head) * push.dv + state_row] = o * norm_w[r] * silu(now.z[r]);
                }
            }
            if (keep_state && state_row < push.dv) {
                [[unroll]] for (uint i = 0u; i < MINE; ++i) {
                    uint quad = LANE + i * LANES;
                    if (quad < QUADS) { state_ring[state_at + state_row * QUADS + quad] = state[r][i]; }
                }
            }
        }
    }
    barrier();
    write_squares(row0 + push.n_tokens - 1u, head, part, (push.n_tokens - 1u) & 1u);
}
