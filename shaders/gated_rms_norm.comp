#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// A team per head. Teams beyond the last head repeat it and write nothing: team_add wants every invocation.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer Z { float z[]; };
layout(binding = 2) readonly buffer W { float w[]; };
layout(binding = 3) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint x_head; uint z_at; uint z_row; uint z_head; uint w_at; uint y_at;
    uint n; uint n_heads; uint head_dim; float eps;
} push;

void main() {
    uint i = WORKGROUP_INDEX * TEAMS + TEAM;
    bool inside = i < push.n;
    i = min(i, push.n - 1u);
    uint row = i / push.n_heads, head = i % push.n_heads;
    uint x_from = push.x_at + row * push.x_row + head * push.x_head;
    uint z_from = push.z_at + row * push.z_row + head * push.z_head;
    float sum = 0.0;
    for (uint d = LANE; d < push.head_dim; d += LANES) { sum = fma(x[x_from + d], x[x_from + d], sum); }
    float scale = inversesqrt(team_add(sum) / float(push.head_dim) + push.eps);
    if (!inside) { return; }
    for (uint d = LANE; d < push.head_dim; d += LANES) {
        float gate = z[z_from + d];
        y[push.y_at + i * push.head_dim + d] = x[x_from + d] * scale * w[push.w_at + d] * (gate / (1.0 + exp(-gate)));
    }
}
