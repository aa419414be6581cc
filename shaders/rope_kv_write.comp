#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"
#include "turns.glsl"

layout(constant_id = 0) const uint DIM = 128u;  // head size

// One workgroup per (row, head): RMS norm and RoPE of a q or k head; k heads also copy v, and both go to the caches.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Projection { float p[]; };
layout(binding = 1) readonly buffer Norms { float norms[]; };
layout(binding = 2) readonly buffer Table { uint table[]; };
layout(binding = 3) readonly buffer Step { int step_values[]; };
layout(binding = 4) buffer Q { float q[]; };
layout(binding = 5) buffer KCache { float k_cache[]; };
layout(binding = 6) buffer VCache { float v_cache[]; };
layout(push_constant) uniform Push {
    uint qg_at; uint qg_row; uint k_at; uint k_row; uint v_at; uint v_row;
    uint q_norm_at; uint k_norm_at; uint table_at; uint step_at; uint step_row;
    uint q_at; uint k_cache_at; uint v_cache_at;
    uint n_rows; uint n_tokens; uint n_head; uint n_head_kv; uint half_rot; uint n_ctx; float eps;
} push;

void main() {
    uint me = gl_LocalInvocationIndex;
    uint per_row = push.n_head + push.n_head_kv;
    uint row = WORKGROUP_INDEX / per_row, head = WORKGROUP_INDEX % per_row;
    if (row >= push.n_rows) { return; }
    uint s = row / push.n_tokens;
    uint position = uint(step_values[push.step_at + s]) + row % push.n_tokens;
    bool is_q = head < push.n_head;
    uint kv_head = head - push.n_head;
    uint x_at = is_q ? push.qg_at + row * push.qg_row + head * 2u * DIM : push.k_at + row * push.k_row + kv_head * DIM;
    uint norm_at = is_q ? push.q_norm_at : push.k_norm_at;
    float sum = 0.0;
    for (uint i = me; i < DIM; i += LOCAL_SIZE) { sum = fma(p[x_at + i], p[x_at + i], sum); }
    float scale = inversesqrt(workgroup_add(sum) / float(DIM) + push.eps);
    if (!is_q && position >= push.n_ctx) { return; }  // the context checks this; never write past the cache
    uint slot = uint(step_values[push.step_at + push.step_row + s]);
    uint cache_row = (slot * push.n_ctx + position) * push.n_head_kv + kv_head;
    uint y_at = is_q ? push.q_at + (row * push.n_head + head) * DIM : push.k_cache_at + cache_row * DIM;
    // Invocations of the rotated part take pairs (i, i + half_rot); the others single dims beyond both halves.
    for (uint i = me; i < DIM - push.half_rot; i += LOCAL_SIZE) {
        bool rotates = i < push.half_rot;
        uint a = rotates ? i : i + push.half_rot, b = i + push.half_rot;
        float x0 = p[x_at + a] * scale * norms[norm_at + a];
        float y0 = x0, y1 = 0.0;
        if (rotates) {
            float x1 = p[x_at + b] * scale * norms[norm_at + b];
            vec2 cs = cos_sin_turns(turns_at(position, table[push.table_at + 2u * i], table[push.table_at + 2u * i + 1u]));
            y0 = fma(x0, cs.x, -(x1 * cs.y));
            y1 = fma(x0, cs.y, x1 * cs.x);
        }
        if (is_q) { q[y_at + a] = y0; } else { k_cache[y_at + a] = y0; }
        if (rotates) {
            if (is_q) { q[y_at + b] = y1; } else { k_cache[y_at + b] = y1; }
        }
    }
    if (!is_q) {
        uint v_at = push.v_at + row * push.v_row + kv_head * DIM, to = push.v_cache_at + cache_row * DIM;
        for (uint i = me; i < DIM; i += LOCAL_SIZE) { v_cache[to + i] = p[v_at + i]; }
    }
}
