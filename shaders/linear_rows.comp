#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Product of a weight matrix with 1..16 rows of x. One team computes N_R weight rows for all TOKENS rows of x, its
// lanes taking every LANES-th chunk of 16 columns. A result's sum has one order whatever TOKENS and N_R are: chunks of
// a lane in order, then team_add; this is what makes decoding independent of the batch.
//
// With NORM the norm costs no pass of its own: y = (W (x * norm)) / sqrt(mean(x^2) + eps), and the squares are summed
// beside the products.
layout(constant_id = 0) const uint TOKENS = 1u;
layout(constant_id = 1) const uint N_R = 1u;
layout(constant_id = 2) const uint AHEAD = 1u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer XQuads { vec4 x_quads[]; };
layout(binding = 2) buffer Y { float y[]; };
#ifdef NORM
layout(binding = 3) readonly buffer Norm { vec4 norm_quads[]; };
#ifdef RESIDUAL
layout(binding = 4) readonly buffer Residual { float residual[]; };
#endif
#elif defined(RESIDUAL)
layout(binding = 3) readonly buffer Residual { float residual[]; };
#endif
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_in; uint n_out;
    uint x_at; uint x_row; uint y_at; uint y_row;
    uint norm_at; float eps; uint residual_at; uint residual_row;
} push;

#include "weights.glsl"

void team_rows(uint first) {
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    float sums[N_R][TOKENS];
    float squares[TOKENS];
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        squares[t] = 0.0;
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r][t] = 0.0; }
    }
    uint n_chunks = push.n_in / 16u;
    for (uint chunk = LANE; chunk < n_chunks; chunk += LANES * AHEAD) {
        // Loads of AHEAD chunks are under way before the first is used; the order of the sums stays the same.
        vec4 w[AHEAD][N_R][4];
        float factor[AHEAD][N_R];
        [[unroll]] for (uint a = 0u; a < AHEAD; ++a) {
            [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                // Past the end of a row or of the matrix something is loaded again and not used.
                uint from = min(chunk + a * LANES, n_chunks - 1u);
                factor[a][r] = load_chunk(planes, push.n_in, min(first + r, push.n_out - 1u), from, w[a][r]);
            }
        }
        [[unroll]] for (uint a = 0u; a < AHEAD; ++a) {
            uint c = chunk + a * LANES;
            if (c >= n_chunks) { break; }
            [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
                uint x_quad = (push.x_at + t * push.x_row) / 4u + c * 4u;
                float part[N_R];
                [[unroll]] for (uint r = 0u; r < N_R; ++r) { part[r] = 0.0; }
                [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                    vec4 v = x_quads[x_quad + i];
#ifdef NORM
                    squares[t] = fma(v.x, v.x, fma(v.y, v.y, fma(v.z, v.z, fma(v.w, v.w, squares[t]))));
                    v *= norm_quads[push.norm_at / 4u + c * 4u + i];
#endif
                    [[unroll]] for (uint r = 0u; r < N_R; ++r) {
                        vec4 q = w[a][r][i];
                        part[r] = fma(q.x, v.x, fma(q.y, v.y, fma(q.z, v.z, fma(q.w, v.w, part[r]))));
                    }
                }
                [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r][t] = fma(part[r], factor[a][r], sums[r][t]); }
            }
        }
    }
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
#ifdef NORM
        float scale = inversesqrt(team_add(squares[t]) / float(push.n_in) + push.eps);
#else
        const float scale = 1.0;
#endif
#ifdef SWIGLU
        [[unroll]] for (uint r = 0u; r < N_R; r += 2u) {
            float gate = team_add(sums[r][t]) * scale;
            float up = team_add(sums[r + 1u][t]) * scale;
            if (LANE == 0u && first + r < push.n_out) {
                y[push.y_at + t * push.y_row + (first + r) / 2u] = gate / (1.0 + exp(-gate)) * up;
            }
        }
#else
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            float value = team_add(sums[r][t]) * scale;
            if (LANE == 0u && first + r < push.n_out) {
#ifdef RESIDUAL
                value += residual[push.residual_at + t * push.residual_row + first + r];
#endif
                y[push.y_at + t * push.y_row + first + r] = value;
            }
        }
#endif
    }
}

void main() {
    // As many workgroups as the host expects to need; where the driver picked other subgroups, they go round again.
    uint step = TEAMS * N_R;
    for (uint base = WORKGROUP_INDEX * step; base < push.n_out; base += WORKGROUPS * step) {
        team_rows(base + TEAM * N_R);
    }
}
