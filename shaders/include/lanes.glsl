// Teams of 8 invocations that sum together.
//
// With SUBGROUP through shuffles among neighbours, without it through shared memory: the same pairs are added in the
// same order, so both variants give the same bits. 8 lanes fit every subgroup from 8 to 128, also where a driver
// picks narrower subgroups than it reports; nothing here depends on the subgroup size. Without SUBGROUP every team_*
// call is a workgroup barrier: call it in uniform control flow, the same number of times by every invocation.
//
//   LANES    lanes in a team          LANE   this invocation's lane
//   TEAMS    teams in the workgroup   TEAM   this invocation's team
//
// LANE_STRIDE, which a kernel may define before, is how many invocations a team's lanes are apart, a power of 2: with 4 the
// same lanes of four teams are neighbours. SUBGROUP needs subgroups of 8 * LANE_STRIDE then. The bits are the same.

#ifndef LANE_STRIDE
#define LANE_STRIDE 1u
#endif
#define LANES 8u
#define LANE (gl_LocalInvocationIndex / LANE_STRIDE % LANES)
#define TEAMS (uint(LOCAL_SIZE) / LANES)
#define TEAM (TEAMS_BLOCK * LANE_STRIDE + gl_LocalInvocationIndex % LANE_STRIDE)
#define TEAMS_BLOCK (gl_LocalInvocationIndex / (LANES * LANE_STRIDE))

#ifdef SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

float team_add(float x) {
    x += subgroupShuffleXor(x, LANE_STRIDE);
    x += subgroupShuffleXor(x, 2u * LANE_STRIDE);
    return x + subgroupShuffleXor(x, 4u * LANE_STRIDE);
}

float team_max(float x) {
    x = max(x, subgroupShuffleXor(x, LANE_STRIDE));
    x = max(x, subgroupShuffleXor(x, 2u * LANE_STRIDE));
    return max(x, subgroupShuffleXor(x, 4u * LANE_STRIDE));
}

#else

shared float lane_values[LOCAL_SIZE];

void share(float x) {
    barrier();
    lane_values[gl_LocalInvocationIndex] = x;
    barrier();
}

// What lane `lane` of this team shared.
float shared_by(uint lane) {
    return lane_values[(TEAMS_BLOCK * LANES + lane) * LANE_STRIDE + gl_LocalInvocationIndex % LANE_STRIDE];
}

float team_add(float x) {
    share(x);
    float a = shared_by(0u) + shared_by(1u), b = shared_by(2u) + shared_by(3u);
    float c = shared_by(4u) + shared_by(5u), d = shared_by(6u) + shared_by(7u);
    return (a + b) + (c + d);
}

float team_max(float x) {
    share(x);
    float best = shared_by(0u);
    for (uint i = 1u; i < LANES; ++i) { best = max(best, shared_by(i)); }
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
