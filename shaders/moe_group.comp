#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Pairs of (row, chosen expert) sorted by expert, and the tiles they are cut into. An invocation collects the pairs of one
// expert in their order; every workgroup counts the pairs of all experts to know where its own begin.
layout(constant_id = 0) const uint N_EXPERT = 1u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Experts { uint experts[]; };
layout(binding = 1) buffer Pairs { uint pairs[]; };
layout(binding = 2) buffer Tiles { uint tiles[]; };
layout(push_constant) uniform Push {
    uint experts_at; uint pairs_at; uint tiles_at; uint n_pairs; uint n_tiles; uint tile;
} push;

shared uint counts[N_EXPERT];

void write_tile(uint i, uint expert, uint first, uint n) {
    uint at = push.tiles_at + i * 3u;
    tiles[at] = expert;
    tiles[at + 1u] = first;
    tiles[at + 2u] = n;
}

void main() {
    uint me = gl_LocalInvocationIndex;
    if (WORKGROUP_INDEX * LOCAL_SIZE >= N_EXPERT) { return; }
    for (uint e = me; e < N_EXPERT; e += LOCAL_SIZE) { counts[e] = 0u; }
    barrier();
    for (uint p = me; p < push.n_pairs; p += LOCAL_SIZE) {
        uint expert = experts[push.experts_at + p];
        if (expert < N_EXPERT) { atomicAdd(counts[expert], 1u); }  // or a wrong number would write anywhere
    }
    barrier();

    uint expert = WORKGROUP_INDEX * LOCAL_SIZE + me;
    if (expert >= N_EXPERT) { return; }
    uint first = 0u, tile = 0u;
    for (uint e = 0u; e < expert; ++e) {
        first += counts[e];
        tile += (counts[e] + push.tile - 1u) / push.tile;
    }
    for (uint done = 0u; done < counts[expert]; done += push.tile) {
        write_tile(tile, expert, first + done, min(push.tile, counts[expert] - done));
        ++tile;
    }
    if (expert == N_EXPERT - 1u) {
        for (; tile < push.n_tiles; ++tile) { write_tile(tile, 0u, 0u, 0u); }
    }
    uint to = push.pairs_at + first;
    for (uint p = 0u; p < push.n_pairs; ++p) {
        if (experts[push.experts_at + p] == expert) {
            pairs[to] = p;
            ++to;
        }
    }
}
