#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

// Draws a token from each row of logits: the steps of vkbackend/draw.py, with the same integers.
//
// Three kernels, each of workgroups that look at one span of one row. BEST finds the greatest logit. BINS sorts the
// row roughly, by distance from it, and finds the bins in which the filters cut and the random number falls. PICK lists
// the tokens of those bins; its last workgroup of a row goes through that list for the token itself.
layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer X { float x[]; };
layout(binding = 1) readonly buffer Settings { uint settings[]; };
layout(binding = 2) readonly buffer Past { int n_past[]; };
layout(binding = 3) coherent buffer Work { uint work[]; };
layout(binding = 4) coherent buffer Counters { uint counters[]; };
layout(binding = 5) buffer Y { int y[]; };
layout(push_constant) uniform Push {
    uint x_at; uint x_row; uint n; uint n_rows; uint span; uint n_spans;
    uint settings_at; uint past_at; uint work_at; uint counters_at; uint y_at;
} push;

#include "last.glsl"
#include "wide.glsl"

const uint N_BINS = 512u, LAST_BIN = N_BINS - 1u, DIGIT = 9u;
const uint NONE = 0xFFFFFFFFu, INFINITY = 0x7F800000u;

// Words of a row in `counters`, and in `work`: the bins to list, what lies before them, the sum over all, the bins'
// sums, the list.
const uint BEST_KEY = 0u, BINS_DONE = 1u, PICK_DONE = 2u, LISTED = 3u, N_COUNTERS = 4u;
const uint FIRST_BIN = 0u, END_BIN = 1u, BEFORE = 2u, TOTAL = 4u, SUMS = 8u, LIST = SUMS + 2u * N_BINS;

uint row, work_row, counter_row;
float best;
uint best_key;

// ---- settings

#define SEED uvec2(settings[push.settings_at], settings[push.settings_at + 1u])
#define SCALE uintBitsToFloat(settings[push.settings_at + 2u])
#define TOP_K settings[push.settings_at + 3u]
#define TOP_P settings[push.settings_at + 4u]
#define MIN_P settings[push.settings_at + 5u]
#define CUT_BY_COUNT (TOP_K > 0u && TOP_K < push.n)
#define CUT_BY_SUM (TOP_P != 0u)
#define CUT_BY_DISTANCE (MIN_P != INFINITY)

// What a token adds to a sum: 2^-(distance * scale), or 1 where the scale is this.
#define EACH_ONE -1.0
#define LOG2_E 1.44269502

// ---- tokens

// Greater numbers have greater keys, zeros of both signs the same, NaN the greatest.
uint key_of(float value) {
    uint bits = floatBitsToUint(value);
    if ((bits & 0x7FFFFFFFu) > INFINITY) { return NONE; }
    if (bits == 0x80000000u) { bits = 0u; }
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

float logit(uint i) { return x[push.x_at + row * push.x_row + i]; }

float distance_of(float value) {
    precise float away = best - value;
    return away;
}

// 32 bins for every power of two from 2^-8 to 2^8.
uint bin_of(float away) {
    return uint(clamp(int(floatBitsToUint(away) >> 18) - (119 << 5), 0, int(LAST_BIN)));
}

uvec2 weight(float away, float scale) {
    if (scale == EACH_ONE) { return uvec2(1u, 0u); }
    precise float powers = away * scale;
    if (!(powers < 44.0)) { return uvec2(0u); }
    float whole = floor(powers);
    precise float part = powers - whole;
    precise float value = 0.000108899236;
    value = value * part + -0.0012743612;
    value = value * part + 0.0095787225;
    value = value * part + -0.05549051;
    value = value * part + 0.2402243;
    value = value * part + -0.69314706;
    value = value * part + 1.0;
    uint fixed_point = uint(value * 16777216.0);
    return shift_right(uvec2(fixed_point << 19, fixed_point >> 13), uint(whole));
}

// Whose row and span this workgroup has; false where there is nothing to do.
bool begin(out uint first, out uint end) {
    row = WORKGROUP_INDEX / push.n_spans;
    uint part = WORKGROUP_INDEX % push.n_spans;
    first = part * push.span;
    end = min(first + push.span, push.n);
    work_row = push.work_at + row * (LIST + push.n);
    counter_row = push.counters_at + row * N_COUNTERS;
    return row < push.n_rows;
}

// False where the row has NaN, or no finite number.
bool know_best() {
    best_key = counters[counter_row + BEST_KEY];
    best = uintBitsToFloat((best_key & 0x80000000u) != 0u ? best_key & 0x7FFFFFFFu : ~best_key);
    return best_key > key_of(uintBitsToFloat(0xFF800000u)) && best_key < key_of(uintBitsToFloat(INFINITY));
}

#ifdef BEST

shared uint span_best;

void main() {
    uint first, end, me = gl_LocalInvocationIndex;
    if (!begin(first, end)) { return; }
    if (me == 0u) { span_best = 0u; }
    barrier();
    uint mine = 0u;
    for (uint i = first + me; i < end; i += LOCAL_SIZE) { mine = max(mine, key_of(logit(i))); }
    atomicMax(span_best, mine);
    barrier();
    if (me == 0u) { atomicMax(counters[counter_row + BEST_KEY], span_best); }
    if (first == 0u) {
        for (uint i = me; i < 2u * N_BINS; i += LOCAL_SIZE) { work[work_row + SUMS + i] = 0u; }
    }
}

#else

#include "sums.glsl"

#ifdef BINS

void main() {
    uint first, end, me = gl_LocalInvocationIndex;
    if (!begin(first, end) || !know_best()) { return; }
    // The first filter says which sums are needed; a bin where it cuts has all that the later ones look at.
    float scale = CUT_BY_COUNT ? EACH_ONE : CUT_BY_SUM ? LOG2_E : SCALE;
    clear_bins();
    for (uint i = first + me; i < end; i += LOCAL_SIZE) {
        float away = distance_of(logit(i));
        add_to_bin(bin_of(away), weight(away, scale));
    }
    barrier();
    for (uint i = me; i < N_BINS; i += LOCAL_SIZE) {
        uint at = work_row + SUMS + i, low = bins_low[i];
        uint high = bins_high[i];
        if (low != 0u && atomicAdd(work[at], low) > NONE - low) { ++high; }
        if (high != 0u) { atomicAdd(work[at + N_BINS], high); }
    }
    if (!last_of(push.n_spans, counter_row + BINS_DONE)) { return; }
    for (uint i = me; i < N_BINS; i += LOCAL_SIZE) {
        bins_low[i] = work[work_row + SUMS + i];
        bins_high[i] = work[work_row + SUMS + N_BINS + i];
    }
    barrier();
    uvec2 total = scan_bins();
    uvec2 rest = CUT_BY_COUNT ? uvec2(TOP_K - 1u, 0u)
        : CUT_BY_SUM ? before_fraction(total, TOP_P) : fraction(total, random_bits(SEED, n_past[push.past_at] + row + 1u));
    uvec2 target = rest;
    uint found = bin_over(rest);
    if (me == 0u) {
        bool whole = !CUT_BY_COUNT && !CUT_BY_SUM;
        uint end_bin = found;
        if (CUT_BY_DISTANCE && !CUT_BY_COUNT) {  // top-p needs the sum of all that top-k keeps
            uint cut = bin_of(uintBitsToFloat(MIN_P));
            end_bin = whole ? cut : min(found, cut);
        }
        bool only_there = whole && !CUT_BY_DISTANCE;
        uvec2 before = only_there ? subtract(target, rest) : uvec2(0u);
        work[work_row + FIRST_BIN] = only_there ? found : 0u;
        work[work_row + END_BIN] = end_bin;
        work[work_row + BEFORE] = before.x;
        work[work_row + BEFORE + 1u] = before.y;
        work[work_row + TOTAL] = total.x;
        work[work_row + TOTAL + 1u] = total.y;
    }
}

#else

shared uint n_here, widest, picked_key, picked;
uint n_listed;

// Lists the tokens of this span that lie in the bins to look at, in any order.
void list_span(uint first, uint end) {
    uint first_bin = work[work_row + FIRST_BIN], end_bin = work[work_row + END_BIN];
    if (gl_LocalInvocationIndex == 0u) { n_here = 0u; }
    barrier();
    for (uint pass = 0u; pass < 2u; ++pass) {
        for (uint i = first + gl_LocalInvocationIndex; i < end; i += LOCAL_SIZE) {
            uint bin = bin_of(distance_of(logit(i)));
            if (bin < first_bin || bin > end_bin) { continue; }
            uint place = atomicAdd(n_here, 1u);
            if (pass == 1u) { work[work_row + LIST + place] = i; }
        }
        barrier();
        if (pass == 0u && gl_LocalInvocationIndex == 0u) { n_here = atomicAdd(counters[counter_row + LISTED], n_here); }
        barrier();
    }
}

// How far a token is from the best one in the order of keys.
uint rank_of(float value) { return best_key - key_of(value); }

// The first listed token, in order, at which the running sum of weights exceeds the target: its (rank, id), by digits
// of 9 bits from the highest, those of the rank and then those of the id. False when the sum of all does not.
bool token_over(float scale, uvec2 target, out uint rank, out uint id) {
    uint lead[2] = uint[2](0u, 0u);
    uint digit = (widest >> 27) != 0u ? 0u : (widest >> 18) != 0u ? 1u : (widest >> 9) != 0u ? 2u : 3u;
    bool alone = false;
    uint shift = 0u;
    rank = id = NONE;
    for (; digit < 7u && !alone; ++digit) {
        bool of_id = digit > 3u;
        shift = of_id ? DIGIT * (6u - digit) : DIGIT * (3u - digit);
        clear_bins();
        for (uint i = gl_LocalInvocationIndex; i < n_listed; i += LOCAL_SIZE) {
            uint token = work[work_row + LIST + i];
            float value = logit(token);
            uint r = rank_of(value);
            uint number = of_id ? token : r;
            bool inside = !of_id || r == lead[0];
            if (inside && (digit == 0u || number >> shift + DIGIT == (of_id ? lead[1] : lead[0]) >> shift + DIGIT)) {
                add_to_bin(number >> shift & LAST_BIN, weight(distance_of(value), scale));
                atomicAdd(bins_n[number >> shift & LAST_BIN], 1u);
            }
        }
        barrier();
        scan_bins();
        uint bin = bin_over(target);
        if (bin == NONE) { return false; }
        alone = bins_n[bin] == 1u;
        if (of_id) { lead[1] |= bin << shift; } else { lead[0] |= bin << shift; }
        barrier();
    }
    // A single token under the digits so far is told by them.
    bool of_id = digit > 4u;
    for (uint i = gl_LocalInvocationIndex; i < n_listed; i += LOCAL_SIZE) {
        uint token = work[work_row + LIST + i];
        uint r = rank_of(logit(token));
        bool here = of_id ? r == lead[0] && token >> shift == lead[1] >> shift : r >> shift == lead[0] >> shift;
        if (here) {
            picked_key = r;
            picked = token;
        }
    }
    barrier();
    rank = picked_key;
    id = picked;
    barrier();
    return true;
}

// Sum of the weights of listed tokens up to (rank, id) that are no further away than `furthest`.
uvec2 sum_up_to(uint rank, uint id, float furthest, float scale) {
    uvec2 sum = uvec2(0u);
    for (uint i = gl_LocalInvocationIndex; i < n_listed; i += LOCAL_SIZE) {
        uint token = work[work_row + LIST + i];
        float value = logit(token), away = distance_of(value);
        uint r = rank_of(value);
        if ((r < rank || (r == rank && token <= id)) && away <= furthest) { sum = add(sum, weight(away, scale)); }
    }
    return add_up(sum);
}

int pick() {
    uint rank = NONE, id = NONE, other_rank, other_id;
    float infinite = uintBitsToFloat(INFINITY);
    uvec2 total = uvec2(work[work_row + TOTAL], work[work_row + TOTAL + 1u]);
    uvec2 before = uvec2(work[work_row + BEFORE], work[work_row + BEFORE + 1u]);
    if (CUT_BY_COUNT && token_over(EACH_ONE, uvec2(TOP_K - 1u, 0u), other_rank, other_id)) {
        rank = other_rank;
        id = other_id;
    }
    if (CUT_BY_SUM) {
        if (CUT_BY_COUNT) { total = sum_up_to(rank, id, infinite, LOG2_E); }
        if (token_over(LOG2_E, before_fraction(total, TOP_P), other_rank, other_id)) {
            rank = other_rank;
            id = other_id;
        }
    }
    if (CUT_BY_COUNT || CUT_BY_SUM || CUT_BY_DISTANCE) {
        total = sum_up_to(rank, id, uintBitsToFloat(MIN_P), SCALE);
    }
    uvec2 drawn = fraction(total, random_bits(SEED, uint(n_past[push.past_at]) + row + 1u));
    return token_over(SCALE, subtract(drawn, before), rank, id) ? int(id) : -1;
}

void main() {
    uint first, end, me = gl_LocalInvocationIndex;
    if (!begin(first, end)) { return; }
    int result = -1;
    if (know_best()) {
        list_span(first, end);
        if (!last_of(push.n_spans, counter_row + PICK_DONE)) { return; }
        n_listed = counters[counter_row + LISTED];
        if (me == 0u) { widest = 0u; }
        barrier();
        uint mine = 0u;
        for (uint i = me; i < n_listed; i += LOCAL_SIZE) { mine = max(mine, rank_of(logit(work[work_row + LIST + i]))); }
        atomicMax(widest, mine);
        barrier();
        result = pick();
        if (me == 0u) { counters[counter_row + LISTED] = 0u; }
    } else if (first != 0u) {
        return;
    }
    if (me == 0u) {
        y[push.y_at + row] = result;
        counters[counter_row + BEST_KEY] = 0u;
    }
}

#endif
#endif
