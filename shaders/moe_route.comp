#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Experts and their weights of one row of router logits a workgroup.
layout(constant_id = 0) const uint N_EXPERT = 1u;
layout(constant_id = 1) const uint N_USED = 1u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Logits { float logits[]; };
layout(binding = 1) buffer Experts { uint experts[]; };
layout(binding = 2) buffer Weights { float weights[]; };
layout(push_constant) uniform Push { uint logits_at; uint logits_row; uint experts_at; uint weights_at; uint n_rows; } push;

#include "top_k.glsl"

void main() {
    uint row = WORKGROUP_INDEX;
    if (row >= push.n_rows) { return; }
    find_top(push.logits_at + row * push.logits_row);
    uint rank = gl_LocalInvocationIndex;
    if (rank < N_USED) {
        experts[push.experts_at + row * N_USED + rank] = top_experts[rank];
        weights[push.weights_at + row * N_USED + rank] = top_weight(rank);
    }
}
