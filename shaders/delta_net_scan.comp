#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Carries the state over the blocks of a prompt; second kernel of three, see ops/delta_net_blocks.py. A workgroup of 128
// takes ROWS state rows of one (sequence, v head). The state is held twice: an invocation has one column in DK / COLUMNS of
// four rows in registers, where it is updated, and all see the copy in shared memory, which k and q are multiplied with.
layout(constant_id = 0) const uint DK = 128u;
const uint BLOCK = 16u, ROWS = 16u;
const uint COLUMNS = 32u, OWN = (DK + COLUMNS - 1u) / COLUMNS;
const uint SPLIT = 4u;  // invocations that share a sum over DK
const uint STAGED = DK / 16u;  // quads of k and q that an invocation loads per block
const uint MIXING = BLOCK * BLOCK / 4u, DECAYS = BLOCK / 2u;  // quads
const uint PARTIAL = 2u * BLOCK * SPLIT * ROWS / 4u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Prepared { vec4 prepared[]; };
layout(binding = 1) readonly buffer Step { int step_values[]; };
layout(binding = 2) buffer StateRing { float state_ring[]; };
layout(binding = 3) buffer Updates { vec4 updates[]; };
layout(binding = 4) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint keys_at; uint values_at; uint mixing_at; uint step_at; uint step_row; uint state_ring_at; uint n_slots;
    uint updates_at; uint y_at; uint n_tokens; uint n_done; uint n_blocks; uint n_seqs;
    uint n_k_heads; uint n_v_heads; uint dv; uint padded_dv; uint grouped;
} push;

shared vec4 keys[DK * 8u];  // [column][8 quads of tokens: k, then q]
shared vec4 copies[PARTIAL];  // the state [column, at most 128][4 quads of rows]; in between, partial sums
shared vec4 mixing[MIXING + DECAYS];
shared vec4 errors[BLOCK * ROWS / 4u];
shared vec4 deltas[BLOCK * ROWS / 4u];

// Places in shared memory, turned so that eight neighbours meet eight different banks both by rows and by columns.
uint key_place(uint column, uint quad) { return column * 8u + (quad ^ (column & 7u)); }
uint copy_place(uint column, uint quad) { return column * 4u + (quad ^ (column >> 1 & 3u)); }

void main() {
    uint me = gl_LocalInvocationIndex, index = WORKGROUP_INDEX, n_parts = push.padded_dv / ROWS;
    uint part = index % n_parts, head = index / n_parts % push.n_v_heads, s = index / n_parts / push.n_v_heads;
    if (s >= push.n_seqs) { return; }
    uint n_past = uint(step_values[push.step_at + s]), slot = uint(step_values[push.step_at + push.step_row + s]);
    uint k_head = push.grouped != 0u ? head / (push.n_v_heads / push.n_k_heads) : head % push.n_k_heads;
    uint value_quads = push.padded_dv / 4u;

    // Three divisions of the work: the update has (column, quad of rows); the products (quad of tokens, share of the sum,
    // quad of rows); what follows them (token, quad of rows).
    uint own_column = me % COLUMNS, own_quad = me / COLUMNS;
    uint quad = me % 4u, strand = me / 4u % SPLIT, token_quad = me / 16u, token = me / 4u;

    vec4 state[OWN];
    uint ring = push.state_ring_at + (slot * push.n_slots * push.n_v_heads + head) * push.dv * DK;
    uint slot_words = push.n_v_heads * push.dv * DK, row0 = part * ROWS + 4u * own_quad;
    uint newest = ring + (n_past + push.n_slots - 1u) % push.n_slots * slot_words;
    [[unroll]] for (uint i = 0u; i < OWN; ++i) {
        uint column = own_column + i * COLUMNS;
        [[unroll]] for (uint r = 0u; r < 4u; ++r) {
            bool there = n_past > 0u && row0 + r < push.dv && column < DK;
            state[i][r] = there ? state_ring[newest + (row0 + r) * DK + column] : 0.0;
        }
    }

    vec4 next_keys[STAGED], next_mixing = vec4(0.0), next_value = vec4(0.0);
    for (uint block = 0u; block <= push.n_blocks; ++block) {
        vec4 value = next_value;
        if (block > 0u) {
            [[unroll]] for (uint i = 0u; i < STAGED; ++i) {
                uint at = me + i * uint(LOCAL_SIZE);
                keys[key_place(at / 8u, at % 8u)] = next_keys[i];
            }
            if (me < MIXING + DECAYS) { mixing[me] = next_mixing; }
            [[unroll]] for (uint i = 0u; i < OWN; ++i) {
                uint column = own_column + i * COLUMNS;
                if (column < DK) { copies[copy_place(column, own_quad)] = state[i]; }
            }
        }
        // Loads are one block ahead of their use.
        if (block < push.n_blocks) {
            uint any_block = s * push.n_blocks + block, any_head = any_block * push.n_v_heads + head;
            uint from = push.keys_at / 4u + (any_block * push.n_k_heads + k_head) * DK * 8u;
            [[unroll]] for (uint i = 0u; i < STAGED; ++i) { next_keys[i] = prepared[from + me + i * uint(LOCAL_SIZE)]; }
            from = push.mixing_at / 4u + any_head * (2u * MIXING + DECAYS);
            if (me < MIXING + DECAYS) { next_mixing = prepared[from + me]; }
            from = push.values_at / 4u + any_head * BLOCK * value_quads + part * 4u;
            if (token < BLOCK) { next_value = prepared[from + token * value_quads + quad]; }
        }
        if (block == 0u) { continue; }
        barrier();

        // state * k and state * q, of all tokens
        vec4 sums[4];
        [[unroll]] for (uint t = 0u; t < 4u; ++t) { sums[t] = vec4(0.0); }
        [[unroll]] for (uint i = 0u; i < DK / SPLIT; ++i) {
            uint column = strand | i * SPLIT;  // no carry: what the places depend on is known but for two values
            vec4 x = copies[copy_place(column, quad)], k = keys[key_place(column, token_quad)];
            [[unroll]] for (uint t = 0u; t < 4u; ++t) { sums[t] = fma(vec4(k[t]), x, sums[t]); }
        }
        barrier();
        [[unroll]] for (uint t = 0u; t < 4u; ++t) { copies[((4u * token_quad + t) * SPLIT + strand) * 4u + quad] = sums[t]; }
        barrier();
        vec4 sum = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < SPLIT; ++i) { sum += copies[(token * SPLIT + i) * 4u + quad]; }
        uint t = token % BLOCK, t_quad = t / 4u, t_part = t % 4u;
        sum *= mixing[MIXING + t_quad][t_part];
        if (token < BLOCK) {
            errors[me] = value - sum;
        } else if ((block - 1u) * BLOCK + t < push.n_done) {
            uint row = s * push.n_tokens + (block - 1u) * BLOCK + t;
            [[unroll]] for (uint r = 0u; r < 4u; ++r) {
                uint d = part * ROWS + 4u * quad + r;
                if (d < push.dv) { y[push.y_at + (row * push.n_v_heads + head) * push.dv + d] = sum[r]; }
            }
        }
        barrier();
        if (token < BLOCK) {
            vec4 delta = vec4(0.0);
            [[unroll]] for (uint i = 0u; i < BLOCK / 4u; ++i) {
                vec4 x = mixing[token * 4u + i];
                [[unroll]] for (uint j = 0u; j < 4u; ++j) { delta = fma(vec4(x[j]), errors[(4u * i + j) * 4u + quad], delta); }
            }
            uint to = push.updates_at / 4u + ((s * push.n_blocks + block - 1u) * push.n_v_heads + head) * BLOCK * value_quads;
            updates[to + token * value_quads + part * 4u + quad] = delta;
            deltas[me] = delta * mixing[MIXING + BLOCK / 4u + t_quad][t_part];
        }
        barrier();
        float decay = mixing[MIXING + BLOCK / 4u - 1u].w;
        [[unroll]] for (uint i = 0u; i < OWN; ++i) { state[i] *= decay; }
        [[unroll]] for (uint q = 0u; q < BLOCK / 4u; ++q) {
            vec4 delta[4];
            [[unroll]] for (uint j = 0u; j < 4u; ++j) { delta[j] = deltas[(4u * q + j) * 4u + own_quad]; }
            [[unroll]] for (uint i = 0u; i < OWN; ++i) {
                vec4 k = keys[key_place(min(own_column + i * COLUMNS, DK - 1u), q)];
                [[unroll]] for (uint j = 0u; j < 4u; ++j) { state[i] = fma(vec4(k[j]), delta[j], state[i]); }
            }
        }
        barrier();
    }

    uint to = ring + (n_past + push.n_done + push.n_slots - 1u) % push.n_slots * slot_words;
    [[unroll]] for (uint i = 0u; i < OWN; ++i) {
        uint column = own_column + i * COLUMNS;
        [[unroll]] for (uint r = 0u; r < 4u; ++r) {
            if (row0 + r < push.dv && column < DK) { state_ring[to + (row0 + r) * DK + column] = state[i][r]; }
        }
    }
}
