// Lane groups: a team of invocations that sums together, independent of how a device builds subgroups.
//
// With SUBGROUP a team is a subgroup (8 to 64 lanes, whatever the driver picked). Without it a team is TEAM_LANES
// neighbouring invocations that sum through shared memory. In that variant every team_* call is a workgroup
// barrier: call it in uniform control flow, the same number of times by every invocation.
//
//   LANES    lanes in a team          LANE   this invocation's lane
//   TEAMS    teams in the workgroup   TEAM   this invocation's team

#ifdef SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require

#define LANES gl_SubgroupSize
#define LANE gl_SubgroupInvocationID
#define TEAMS gl_NumSubgroups
#define TEAM gl_SubgroupID

float team_add(float x) { return subgroupAdd(x); }
float team_max(float x) { return subgroupMax(x); }

#else

#define TEAM_LANES 32u
#define LANES TEAM_LANES
#define LANE (gl_LocalInvocationIndex % TEAM_LANES)
#define TEAMS (LOCAL_SIZE / TEAM_LANES)
#define TEAM (gl_LocalInvocationIndex / TEAM_LANES)

shared float team_scratch[LOCAL_SIZE];

float team_add(float x) {
    barrier();
    team_scratch[gl_LocalInvocationIndex] = x;
    for (uint half_width = TEAM_LANES / 2u; half_width > 0u; half_width /= 2u) {
        barrier();
        if (LANE < half_width) {
            team_scratch[gl_LocalInvocationIndex] += team_scratch[gl_LocalInvocationIndex + half_width];
        }
    }
    barrier();
    return team_scratch[TEAM * TEAM_LANES];
}

float team_max(float x) {
    barrier();
    team_scratch[gl_LocalInvocationIndex] = x;
    for (uint half_width = TEAM_LANES / 2u; half_width > 0u; half_width /= 2u) {
        barrier();
        if (LANE < half_width) {
            team_scratch[gl_LocalInvocationIndex] =
                max(team_scratch[gl_LocalInvocationIndex], team_scratch[gl_LocalInvocationIndex + half_width]);
        }
    }
    barrier();
    return team_scratch[TEAM * TEAM_LANES];
}

#endif

// Sum over the whole workgroup; the result is the same in every invocation. Uniform control flow only.
// At most LOCAL_SIZE teams. Teams are added in their order, so the result does not vary.
shared float workgroup_partial[LOCAL_SIZE];

float workgroup_add(float x) {
    float team_sum = team_add(x);
    barrier();
    if (LANE == 0u) { workgroup_partial[TEAM] = team_sum; }
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < TEAMS; ++i) { total += workgroup_partial[i]; }
    return total;
}

float workgroup_max(float x) {
    float team_best = team_max(x);
    barrier();
    if (LANE == 0u) { workgroup_partial[TEAM] = team_best; }
    barrier();
    float best = workgroup_partial[0];
    for (uint i = 1u; i < TEAMS; ++i) { best = max(best, workgroup_partial[i]); }
    return best;
}
