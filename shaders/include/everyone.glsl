// A barrier over all workgroups of a dispatch. Only where they surely run side by side (Limits.resident_groups): one that
// waits for a workgroup that has not begun would wait for ever. So waiting is bounded, and the dispatch says how it ended.
//
// The including kernel declares `coherent buffer ... { uint counters[]; }` and writes what others are to read to coherent
// buffers. Word `at` is zero when the dispatch begins, and counts arrivals; its highest bit says that somebody gave up.

const uint MAX_TRIES = 1u << 18;  // of about half a microsecond: well below a driver's watchdog
const uint GAVE_UP = 1u << 31;

shared bool all_here;

// The n-th wait (from 1) of this dispatch; false in every workgroup when one of them has given up. Uniform control flow only.
bool everyone(uint n, uint at) {
    memoryBarrierBuffer();  // what this invocation wrote comes before ...
    barrier();              // ... and so for the whole workgroup
    if (gl_LocalInvocationIndex == 0u) {
        uint all = n * WORKGROUPS;
        uint seen = atomicAdd(counters[at], 1u) + 1u;
        for (uint tries = 0u; seen < all && tries < MAX_TRIES; ++tries) { seen = atomicOr(counters[at], 0u); }
        if (seen < all) { seen = atomicOr(counters[at], GAVE_UP); }  // the last one may have come just now
        all_here = seen >= all && (seen & GAVE_UP) == 0u;
    }
    barrier();
    memoryBarrierBuffer();
    return all_here;
}
