#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// One step of many that each must wait for the one before: every workgroup counts on from what another one wrote in the
// step before, in memory that it read itself two steps ago, and some workgroups take longer. So a step that begins too
// early, or sees old values in a cache, spoils the count for good. The host: vkbackend/device/kompute_order.py.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) buffer Words { uint words[]; };
layout(push_constant) uniform Push { uint from; uint to; uint turns; uint zero; } push;

void main() {
    if (gl_LocalInvocationIndex > 0u) { return; }
    uint seen = words[push.from + WORKGROUPS - 1u - WORKGROUP_INDEX], x = seen;
    if (WORKGROUP_INDEX % 8u == seen % 8u) {
        for (uint i = 0u; i < push.turns; ++i) { x = x * 1664525u + 1013904223u; }
    }
    words[push.to + WORKGROUP_INDEX] = seen + 1u + (x & push.zero);
}
