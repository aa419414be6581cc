#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// What a block of BLOCK prompt tokens needs of its own tokens only; first kernel of three, see ops/delta_net_blocks.py.
// A workgroup takes one (sequence, block, k head) and the v heads that share it. Tokens past the last one are zeros with
// decay 1 and step size 0, which leave the state alone.
layout(constant_id = 0) const uint DK = 128u;
layout(constant_id = 1) const uint TAPS = 4u;
const uint BLOCK = 16u;  // = TEAMS
const uint QUADS = DK / 4u, PITCH = QUADS + 1u;  // of the rows in shared memory: neighbours in different banks

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Projection { float p[]; };
layout(binding = 1) readonly buffer Params { float w[]; };
layout(binding = 2) readonly buffer Step { int step_values[]; };
layout(binding = 3) readonly buffer ConvRing { float conv_ring[]; };
layout(binding = 4) buffer Prepared { float prepared[]; };
layout(push_constant) uniform Push {
    uint qkv_at; uint alpha_at; uint beta_at; uint p_row;
    uint conv_w_at; uint dt_at; uint a_at; uint step_at; uint step_row; uint conv_ring_at; uint n_columns;
    uint keys_at; uint values_at; uint mixing_at; uint n_tokens; uint n_done; uint n_blocks; uint n_seqs;
    uint n_k_heads; uint n_v_heads; uint dv; uint padded_dv; float eps; uint grouped;
} push;

#include "conv_taps.glsl"

shared vec4 rows[2u * BLOCK * PITCH];  // k of every token, then q
shared float scales[2u * BLOCK];
shared float dots[2u * BLOCK * BLOCK];  // [k or q of token i][k of token j]
shared float gates[BLOCK];  // logarithms of the decays
shared float betas[BLOCK];
shared float lower[BLOCK * BLOCK];

void main() {
    uint me = gl_LocalInvocationIndex, index = WORKGROUP_INDEX;
    uint k_head = index % push.n_k_heads, block = index / push.n_k_heads % push.n_blocks;
    uint s = index / push.n_k_heads / push.n_blocks;
    if (s >= push.n_seqs) { return; }
    uint n_past = uint(step_values[push.step_at + s]), slot = uint(step_values[push.step_at + push.step_row + s]);
    uint row0 = s * push.n_tokens, first = block * BLOCK, n = min(BLOCK, push.n_done - first);
    uint key_dim = push.n_k_heads * DK, conv_dim = 2u * key_dim + push.n_v_heads * push.dv;
    uint share = push.n_v_heads / push.n_k_heads, any_block = s * push.n_blocks + block;

    for (uint c = me; c < 2u * DK; c += LOCAL_SIZE) {
        uint channel = (c < DK ? key_dim : 0u) + k_head * DK + c % DK;
        Tap tap = load_tap(channel, slot, n_past, row0, first, conv_dim);
        [[unroll]] for (uint t = 0u; t < BLOCK; ++t) {
            float x = t < n ? p[push.qkv_at + (row0 + first + t) * push.p_row + channel] : 0.0;
            float mixed = convolve(tap, x);
            rows[(c / DK * BLOCK + t) * PITCH + c % DK / 4u][c % 4u] = t < n ? mixed : 0.0;
        }
    }
    for (uint c = me; c < share * push.padded_dv; c += LOCAL_SIZE) {
        uint member = c / push.padded_dv, row = c % push.padded_dv;
        uint head = push.grouped != 0u ? k_head * share + member : k_head + member * push.n_k_heads;
        uint channel = 2u * key_dim + head * push.dv + min(row, push.dv - 1u);
        uint to = push.values_at + (any_block * push.n_v_heads + head) * BLOCK * push.padded_dv + row;
        Tap tap = load_tap(channel, slot, n_past, row0, first, conv_dim);
        [[unroll]] for (uint t = 0u; t < BLOCK; ++t) {
            float x = t < n ? p[push.qkv_at + (row0 + first + t) * push.p_row + channel] : 0.0;
            float mixed = convolve(tap, x);
            prepared[to + t * push.padded_dv] = t < n && row < push.dv ? mixed : 0.0;
        }
    }
    barrier();
    [[unroll]] for (uint i = 0u; i < 2u; ++i) {
        float sum = 0.0;
        for (uint quad = LANE; quad < QUADS; quad += LANES) {
            vec4 x = rows[(i * BLOCK + TEAM) * PITCH + quad];
            sum += dot(x, x);
        }
        float scale = inversesqrt(team_add(sum) + push.eps);
        if (LANE == 0u) { scales[i * BLOCK + TEAM] = i == 0u ? scale : scale * inversesqrt(float(DK)); }
    }
    barrier();

    // k and q by columns, as the scan wants them: [DK][k of 16 tokens, q of 16 tokens].
    for (uint i = me; i < 2u * BLOCK * QUADS; i += LOCAL_SIZE) {
        uint row = i % (2u * BLOCK), quad = i / (2u * BLOCK);
        vec4 x = rows[row * PITCH + quad] * scales[row];
        uint to = push.keys_at + ((any_block * push.n_k_heads + k_head) * DK + 4u * quad) * 2u * BLOCK + row;
        [[unroll]] for (uint c = 0u; c < 4u; ++c) { prepared[to + c * 2u * BLOCK] = x[c]; }
    }
    uint j = me % BLOCK, i0 = me / BLOCK;
    float sums[4];
    [[unroll]] for (uint m = 0u; m < 4u; ++m) { sums[m] = 0.0; }
    for (uint quad = 0u; quad < QUADS; ++quad) {
        vec4 k = rows[j * PITCH + quad];
        [[unroll]] for (uint m = 0u; m < 4u; ++m) { sums[m] += dot(rows[(i0 + 8u * m) * PITCH + quad], k); }
    }
    [[unroll]] for (uint m = 0u; m < 4u; ++m) {
        uint i = i0 + 8u * m;
        dots[i * BLOCK + j] = sums[m] * scales[i] * scales[j];
    }

    for (uint member = 0u; member < share; ++member) {
        uint head = push.grouped != 0u ? k_head * share + member : k_head + member * push.n_k_heads;
        uint to = push.mixing_at + (any_block * push.n_v_heads + head) * (2u * BLOCK * BLOCK + 2u * BLOCK);
        barrier();
        if (me < BLOCK) {
            uint at = (row0 + first + me) * push.p_row + head;
            gates[me] = me < n ? softplus(p[push.alpha_at + at] + w[push.dt_at + head]) * w[push.a_at + head] : 0.0;
            betas[me] = me < n ? 1.0 / (1.0 + exp(-p[push.beta_at + at])) : 0.0;
        }
        barrier();
        // Decays over stretches are summed for each stretch: differences of long sums would lose digits.
        [[unroll]] for (uint m = 0u; m < 2u; ++m) {
            uint i = i0 + 8u * m;
            float sum = 0.0;
            [[unroll]] for (uint t = 1u; t < BLOCK; ++t) { sum += t > j && t <= i ? gates[t] : 0.0; }
            float decay = j <= i ? exp(sum) : 0.0;
            lower[i * BLOCK + j] = j < i ? decay * betas[i] * dots[i * BLOCK + j] : 0.0;
            prepared[to + 2u * BLOCK + BLOCK * BLOCK + i * BLOCK + j] = decay * dots[(BLOCK + i) * BLOCK + j];
        }
        barrier();
        if (me < BLOCK) {
            // Column `me` of the inverse of I + lower, from the top.
            float x[BLOCK];
            [[unroll]] for (uint i = 0u; i < BLOCK; ++i) {
                x[i] = i == me ? 1.0 : 0.0;
                [[unroll]] for (uint m = 0u; m < i; ++m) { x[i] = fma(-lower[i * BLOCK + m], x[m], x[i]); }
                prepared[to + i * BLOCK + me] = x[i] * betas[me];
            }
        } else if (me < 3u * BLOCK) {
            // The decay from the block's beginning to every token, and from there to its end.
            uint t = me % BLOCK;
            bool to_end = me >= 2u * BLOCK;
            float sum = 0.0;
            [[unroll]] for (uint m = 0u; m < BLOCK; ++m) { sum += (m > t) == to_end ? gates[m] : 0.0; }
            prepared[to + BLOCK * BLOCK + me - BLOCK] = exp(sum);
        }
    }
}
