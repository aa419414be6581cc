#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// A team per head. Teams beyond the last head repeat it and write nothing: team_add wants every invocation.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint x_head; uint y_at; uint n; uint n_heads; uint head_dim; float eps;
} push;

void main() {
    uint i = WORKGROUP_INDEX * TEAMS + TEAM;
    bool inside = i < push.n;
    i = min(i, push.n - 1u);
    uint from = push.x_at + i / push.n_heads * push.x_row + i % push.n_heads * push.x_head;
    float sum = 0.0;
    for (uint d = LANE; d < push.head_dim; d += LANES) { sum = fma(x[from + d], x[from + d], sum); }
    float scale = inversesqrt(team_add(sum) + push.eps);
    if (!inside) { return; }
    for (uint d = LANE; d < push.head_dim; d += LANES) { y[push.y_at + i * push.head_dim + d] = x[from + d] * scale; }
}
