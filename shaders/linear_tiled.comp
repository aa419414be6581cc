#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Product of a weight matrix with many rows of x (prompts). A workgroup computes LOCAL_SIZE * N_W weight rows times
// N_X rows of x: an invocation holds its N_W weight rows' sums with all N_X rows in registers, and walks the columns
// 16 at a time. Weights go from memory to registers (each is needed by one invocation only), x through shared memory,
// where all invocations read the same place at once. Loads are one step ahead of their use.
layout(constant_id = 0) const uint N_W = 1u;
layout(constant_id = 1) const uint N_X = 8u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { vec4 x_quads[]; };
layout(binding = 2) buffer Y { float y[]; };
#ifdef RESIDUAL
layout(binding = 3) readonly buffer Residual { float residual[]; };
#endif
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out;
    uint x_at; uint x_row; uint y_at; uint y_row;
    uint n_x; uint residual_at; uint residual_row; uint n_w_tiles;
} push;

#include "weights.glsl"

const uint STAGED = (N_X * 4u + LOCAL_SIZE - 1u) / LOCAL_SIZE;  // quads of x that an invocation brings per step

shared vec4 x_tile[N_X * 4u];

uint x_quad(uint x_first, uint i, uint chunk) {
    uint row = min(x_first + i / 4u, push.n_x - 1u);
    return (push.x_at + row * push.x_row) / 4u + chunk * 4u + i % 4u;
}

void main() {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    uint me = gl_LocalInvocationIndex;
    uint first = (WORKGROUP_INDEX % push.n_w_tiles * LOCAL_SIZE + me) * N_W;
    uint x_first = WORKGROUP_INDEX / push.n_w_tiles * N_X;
    if (x_first >= push.n_x) { return; }
    float sums[N_W][N_X];
    [[unroll]] for (uint r = 0u; r < N_W; ++r) { [[unroll]] for (uint t = 0u; t < N_X; ++t) { sums[r][t] = 0.0; } }

    uint n_chunks = push.n_in / 16u;
    vec4 next_x[STAGED];
    Chunk next_w[N_W];
    [[unroll]] for (uint i = 0u; i < STAGED; ++i) {
        uint quad = me + i * LOCAL_SIZE;
        if (quad < N_X * 4u) { next_x[i] = x_quads[x_quad(x_first, quad, 0u)]; }
    }
    [[unroll]] for (uint r = 0u; r < N_W; ++r) {
        next_w[r] = load_chunk(planes, push.n_in, min(first + r, push.n_out - 1u), 0u);
    }
    for (uint chunk = 0u; chunk < n_chunks; ++chunk) {
        barrier();
        [[unroll]] for (uint i = 0u; i < STAGED; ++i) {
            uint quad = me + i * LOCAL_SIZE;
            if (quad < N_X * 4u) { x_tile[quad] = next_x[i]; }
        }
        Chunk w[N_W];
        [[unroll]] for (uint r = 0u; r < N_W; ++r) { w[r] = next_w[r]; }
        uint next = min(chunk + 1u, n_chunks - 1u);
        [[unroll]] for (uint i = 0u; i < STAGED; ++i) {
            uint quad = me + i * LOCAL_SIZE;
            if (quad < N_X * 4u) { next_x[i] = x_quads[x_quad(x_first, quad, next)]; }
        }
        [[unroll]] for (uint r = 0u; r < N_W; ++r) {
            next_w[r] = load_chunk(planes, push.n_in, min(first + r, push.n_out - 1u), next);
        }
        barrier();
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            vec4 q[N_W];
            [[unroll]] for (uint r = 0u; r < N_W; ++r) { q[r] = weights(w[r], i); }
            [[unroll]] for (uint t = 0u; t < N_X; ++t) {
                vec4 v = x_tile[t * 4u + i];
                [[unroll]] for (uint r = 0u; r < N_W; ++r) {
                    sums[r][t] = fma(q[r].x, v.x, fma(q[r].y, v.y, fma(q[r].z, v.z, fma(q[r].w, v.w, sums[r][t]))));
                }
            }
        }
    }
    [[unroll]] for (uint t = 0u; t < N_X; ++t) {
        uint row = x_first + t;
        if (row < push.n_x) {
#ifdef SWIGLU
            [[unroll]] for (uint r = 0u; r < N_W; r += 2u) {
                if (first + r < push.n_out) {
                    float gate = sums[r][t];
                    y[push.y_at + row * push.y_row + (first + r) / 2u] = gate / (1.0 + exp(-gate)) * sums[r + 1u][t];
                }
            }
#else
            [[unroll]] for (uint r = 0u; r < N_W; ++r) {
                if (first + r < push.n_out) {
                    float value = sums[r][t];
#ifdef RESIDUAL
                    value += residual[push.residual_at + row * push.residual_row + first + r];
#endif
                    y[push.y_at + row * push.y_row + first + r] = value;
                }
            }
#endif
        }
    }
}
