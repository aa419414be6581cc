#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// One workgroup per token: copies (and decodes) its row of one part of the table, if the token lies in that part.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) readonly buffer Tokens { int tokens[]; };
layout(binding = 2) buffer Y { float y[]; };
layout(push_constant) uniform Push {
    uint plane_0; uint plane_1; uint plane_2; uint n_embd; uint first_row; uint n_part;
    uint tokens_at; uint n_tokens; uint y_at; uint y_row;
} push;

#include "weights.glsl"

void main() {
    uint t = WORKGROUP_INDEX;
    if (t >= push.n_tokens) { return; }
    uint row = uint(tokens[push.tokens_at + t]) - push.first_row;  // wraps around for rows of earlier parts
    if (row >= push.n_part) { return; }
    uvec3 planes = uvec3(push.plane_0, push.plane_1, push.plane_2);
    for (uint chunk = gl_LocalInvocationIndex; chunk * 16u < push.n_embd; chunk += LOCAL_SIZE) {
        Chunk c = load_chunk(planes, push.n_embd, row, chunk);
        uint at = push.y_at + t * push.y_row + chunk * 16u;
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            vec4 w = weights(c, i);
            [[unroll]] for (uint j = 0u; j < 4u; ++j) { y[at + 4u * i + j] = w[j]; }
        }
    }
}
