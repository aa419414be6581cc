#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Source { uint source[]; };
layout(binding = 1) writeonly buffer Target { uint target[]; };
layout(push_constant) uniform Push { uint source_at; uint target_at; uint n; } push;

void main() {
    for (uint i = gl_GlobalInvocationID.x; i < push.n; i += gl_NumWorkGroups.x * LOCAL_SIZE) {
        target[push.target_at + i] = source[push.source_at + i];
    }
}
