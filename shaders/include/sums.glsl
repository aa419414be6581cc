// Sums of 64 bits by bins, in a workgroup: N_BINS of them, at least as many as invocations. As they are of integers,
// the order in which invocations add does not matter. Everything here is for uniform control flow.

shared uint bins_low[N_BINS], bins_high[N_BINS], bins_n[N_BINS];
shared uvec2 running[LOCAL_SIZE];  // sums of the invocations' bins up to here
shared uint found_bin;
shared uvec2 found_before;

const uint BINS_EACH = N_BINS / LOCAL_SIZE;

void clear_bins() {
    for (uint i = gl_LocalInvocationIndex; i < N_BINS; i += LOCAL_SIZE) { bins_low[i] = bins_high[i] = bins_n[i] = 0u; }
    barrier();
}

// By any invocation, between clear_bins and a barrier.
void add_to_bin(uint bin, uvec2 value) {
    if (value.x != 0u && atomicAdd(bins_low[bin], value.x) > 0xFFFFFFFFu - value.x) { ++value.y; }
    if (value.y != 0u) { atomicAdd(bins_high[bin], value.y); }
}

// The sum of what the invocations hold, in all of them; `running` has the sums up to each.
uvec2 add_up(uvec2 mine) {
    uint me = gl_LocalInvocationIndex;
    barrier();
    running[me] = mine;
    barrier();
    for (uint step = 1u; step < LOCAL_SIZE; step *= 2u) {
        uvec2 other = me >= step ? running[me - step] : uvec2(0u);
        barrier();
        running[me] = add(running[me], other);
        barrier();
    }
    return running[LOCAL_SIZE - 1u];
}

uvec2 bin_sum(uint bin) { return uvec2(bins_low[bin], bins_high[bin]); }

// The sum of all bins, after which `bin_over` can be asked.
uvec2 scan_bins() {
    uvec2 mine = uvec2(0u);
    for (uint i = 0u; i < BINS_EACH; ++i) { mine = add(mine, bin_sum(gl_LocalInvocationIndex * BINS_EACH + i)); }
    return add_up(mine);
}

// The first bin at which the running sum exceeds the target, NONE without one; the target becomes what is left of it
// after the bins before.
uint bin_over(inout uvec2 target) {
    uint me = gl_LocalInvocationIndex;
    if (me == 0u) { found_bin = NONE; }
    barrier();
    uvec2 sum = me > 0u ? running[me - 1u] : uvec2(0u);
    if (!less(target, sum) && less(target, running[me])) {
        for (uint i = 0u; i < BINS_EACH; ++i) {
            uvec2 next = add(sum, bin_sum(me * BINS_EACH + i));
            if (less(target, next)) {
                found_bin = me * BINS_EACH + i;
                found_before = sum;
                break;
            }
            sum = next;
        }
    }
    barrier();
    uint found = found_bin;
    if (found != NONE) { target = subtract(target, found_before); }
    barrier();
    return found;
}
