#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// A few integers: one invocation does it all.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) buffer Tokens { int tokens[]; };
layout(binding = 1) readonly buffer Targets { int targets[]; };
layout(binding = 2) buffer Steps { int steps[]; };
layout(binding = 3) buffer Accepted { int accepted[]; };
layout(binding = 4) buffer Log { int log_values[]; };
#ifdef FORCED
layout(binding = 5) readonly buffer Forced { int forced[]; };
#endif
layout(push_constant) uniform Push {
    uint tokens_at; uint targets_at; uint steps_at; uint accepted_at; uint log_at; uint n; uint forced_at;
} push;

void main() {
    if (gl_LocalInvocationIndex != 0u) { return; }
    uint m = 0u;
    while (m < push.n && tokens[push.tokens_at + 1u + m] == targets[push.targets_at + m]) { ++m; }
#ifdef FORCED
    m = uint(clamp(forced[push.forced_at], 0, int(push.n)));
#endif
    int past = steps[push.steps_at + 2u * push.n];
    int next = past + int(m) + 1;
    accepted[push.accepted_at] = int(m);
    log_values[push.log_at] = int(m);
    for (uint i = 0u; i <= push.n; ++i) { log_values[push.log_at + 1u + i] = targets[push.targets_at + i]; }
    tokens[push.tokens_at] = targets[push.targets_at + m];
    steps[push.steps_at] = past + 1;
    for (uint i = 1u; i < push.n; ++i) { steps[push.steps_at + 2u * i] = next + int(i); }
    steps[push.steps_at + 2u * push.n] = next;
}
