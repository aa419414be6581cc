// Teams of 8 invocations that sum together.
//
// With SUBGROUP through shuffles among neighbours, without it through shared memory: the same pairs are added in the
// same order, so both variants give the same bits. 8 lanes fit every subgroup from 8 to 128, also where a driver
// picks narrower subgroups than it reports; nothing here depends on the subgroup size. Without SUBGROUP every team_*
// call is a workgroup barrier: call it in uniform control flow, the same number of times by every invocation.
//
//   LANES    lanes in a team          LANE   this invocation's lane
//   TEAMS    teams in the workgroup   TEAM   this invocation's team

#define LANES 8u
#define LANE (gl_LocalInvocationIndex % LANES)
#define TEAMS (uint(LOCAL_SIZE) / LANES)
#define TEAM (gl_LocalInvocationIndex / LANES)

#ifdef SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

float team_add(float x) {
    x += subgroupShuffleXor(x, 1u);
    x += subgroupShuffleXor(x, 2u);
    return x + subgroupShuffleXor(x, 4u);
}

float team_max(float x) {
    x = max(x, subgroupShuffleXor(x, 1u));
    x = max(x, subgroupShuffleXor(x, 2u));
    return max(x, subgroupShuffleXor(x, 4u));
}

#else

shared float lane_values[LOCAL_SIZE];

void share(float x) {
    barrier();
    lane_values[gl_LocalInvocationIndex] = x;
    barrier();
}

float team_add(float x) {
    share(x);
    uint i = TEAM * LANES;
    float a = lane_values[i] + lane_values[i + 1u], b = lane_values[i + 2u] + lane_values[i + 3u];
    float c = lane_values[i + 4u] + lane_values[i + 5u], d = lane_values[i + 6u] + lane_values[i + 7u];
    return (a + b) + (c + d);
}

float team_max(float x) {
    share(x);
    float best = lane_values[TEAM * LANES];
    for (uint i = 1u; i < LANES; ++i) { best = max(best, lane_values[TEAM * LANES + i]); }
    return best;
}

#endif

// Over the whole workgroup; the result is the same in every invocation. Uniform control flow only.
shared float workgroup_partial[LOCAL_SIZE / 8];

float workgroup_add(float x) {
    float team_sum = team_add(x);
    barrier();
    if (LANE == 0u) { workgroup_partial[TEAM] = team_sum; }
    barrier();
    float total = 0.0;
    [[unroll]] for (uint i = 0u; i < TEAMS; ++i) { total += workgroup_partial[i]; }
    return total;
}

float workgroup_max(float x) {
    float team_best = team_max(x);
    barrier();
    if (LANE == 0u) { workgroup_partial[TEAM] = team_best; }
    barrier();
    float best = workgroup_partial[0];
    [[unroll]] for (uint i = 1u; i < TEAMS; ++i) { best = max(best, workgroup_partial[i]); }
    return best;
}
