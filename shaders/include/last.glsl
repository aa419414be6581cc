// Joining parts in the dispatch that made them: the workgroup that finishes last does it, and nobody waits.
//
// The including kernel declares `coherent buffer ... { uint counters[]; }` (ops/op.py: counters) and writes its part to
// a coherent buffer. Which workgroup comes last is chance: parts must be joined in their own order.

// Where workgroup memory is short, LAST_WORD may be defined as a shared uint of the kernel's own that is free by then.
#ifndef LAST_WORD
shared uint last_word;
#define LAST_WORD last_word
#endif

// True in the last of `n` workgroups to call this with counter word `at`, which is zero before and after; in that
// workgroup all parts can be read. Uniform control flow only.
bool last_of(uint n, uint at) {
    memoryBarrierBuffer();  // what this invocation wrote comes before ...
    barrier();              // ... and so for the whole workgroup
    if (gl_LocalInvocationIndex == 0u) {
        bool last = atomicAdd(counters[at], 1u) == n - 1u;
        if (last) { counters[at] = 0u; }
        LAST_WORD = last ? 1u : 0u;
    }
    barrier();
    memoryBarrierBuffer();
    return LAST_WORD == 1u;
}
