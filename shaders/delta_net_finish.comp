#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Adds what the tokens of a block give to each other's outputs, and gates; third kernel of three, see
// ops/delta_net_blocks.py. A workgroup takes one (sequence, block, v head), an invocation a row of the state.
const uint BLOCK = 16u;  // = TEAMS
const uint PART = 32u;  // state rows of a sum of squares: ROWS of delta_net_mixer
const uint PITCH = LOCAL_SIZE + LANES;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Projection { float p[]; };
layout(binding = 1) readonly buffer Params { float w[]; };
layout(binding = 2) readonly buffer Prepared { float prepared[]; };
layout(binding = 3) buffer Y { float y[]; };
layout(binding = 4) buffer Squares { float squares[]; };
layout(push_constant) uniform Push {
    uint z_at; uint p_row; uint norm_at; uint mixing_at; uint updates_at; uint y_at; uint squares_at;
    uint n_tokens; uint n_done; uint n_blocks; uint n_seqs; uint n_v_heads; uint dv; uint padded_dv; uint n_parts;
} push;

shared float mixing[BLOCK * BLOCK];
shared float square_shared[BLOCK * PITCH];

float silu(float x) { return x / (1.0 + exp(-x)); }

void main() {
    uint me = gl_LocalInvocationIndex, index = WORKGROUP_INDEX;
    uint head = index % push.n_v_heads, block = index / push.n_v_heads % push.n_blocks;
    uint s = index / push.n_v_heads / push.n_blocks;
    if (s >= push.n_seqs) { return; }
    uint first = block * BLOCK, n = min(BLOCK, push.n_done - first), row0 = s * push.n_tokens + first;
    uint any_head = (s * push.n_blocks + block) * push.n_v_heads + head;
    uint from = push.mixing_at + any_head * (2u * BLOCK * BLOCK + 2u * BLOCK) + BLOCK * BLOCK + 2u * BLOCK;
    for (uint i = me; i < BLOCK * BLOCK; i += LOCAL_SIZE) { mixing[i] = prepared[from + i]; }
    barrier();

    for (uint d0 = 0u; d0 < push.dv; d0 += LOCAL_SIZE) {
        uint d = d0 + me;
        bool inside = d < push.dv;
        float delta[BLOCK];
        [[unroll]] for (uint t = 0u; t < BLOCK; ++t) {
            delta[t] = inside ? prepared[push.updates_at + (any_head * BLOCK + t) * push.padded_dv + d] : 0.0;
        }
        float norm_w = inside ? w[push.norm_at + d] : 0.0;
        [[unroll]] for (uint t = 0u; t < BLOCK; ++t) {
            float o = 0.0;
            if (inside && t < n) {
                uint at = push.y_at + ((row0 + t) * push.n_v_heads + head) * push.dv + d;
                o = y[at];
                [[unroll]] for (uint j = 0u; j <= t; ++j) { o = fma(mixing[t * BLOCK + j], delta[j], o); }
                y[at] = o * norm_w * silu(p[push.z_at + (row0 + t) * push.p_row + head * push.dv + d]);
            }
            square_shared[t * PITCH + me] = o * o;
        }
        barrier();
        [[unroll]] for (uint part = 0u; part < LOCAL_SIZE / PART; ++part) {
            float sum = 0.0;
            [[unroll]] for (uint i = 0u; i < PART / LANES; ++i) {
                sum += square_shared[TEAM * PITCH + part * PART + i * LANES + LANE];
            }
            sum = team_add(sum);
            uint to = d0 / PART + part;
            if (LANE == 0u && TEAM < n && to < push.n_parts) {
                squares[push.squares_at + ((row0 + TEAM) * push.n_v_heads + head) * push.n_parts + to] = sum;
            }
        }
        barrier();
    }
}
