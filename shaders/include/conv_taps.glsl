// The causal depthwise conv of the delta net, channel by channel, token after token.
//
// The including kernel defines TAPS (a constant, at most MAX_TAPS), p (rows of the projection), w, conv_ring and `push`.

const uint MAX_TAPS = 4u;

float silu(float x) { return x / (1.0 + exp(-x)); }

// One channel of the conv: its taps' weights, and its last raw columns (newest last). Unused taps come first, as zeros.
struct Tap { float weight[MAX_TAPS]; float past[MAX_TAPS]; };

// For token `first` of a batch whose token 0 is row `row0` at position n_past: older columns are rows of the batch as far
// as it reaches back, then columns of the ring.
Tap load_tap(uint channel, uint slot, uint n_past, uint row0, uint first, uint conv_dim) {
    Tap tap;
    [[unroll]] for (uint j = 0u; j < MAX_TAPS; ++j) {
        uint back = MAX_TAPS - 1u - j;
        tap.weight[j] = back < TAPS ? w[push.conv_w_at + channel * TAPS + (TAPS - 1u - back)] : 0.0;
        tap.past[j] = 0.0;
        if (back > 0u && back < TAPS && back > first && back <= n_past + first) {
            uint column = (n_past + first - back) % push.n_columns;
            tap.past[j] = conv_ring[push.conv_ring_at + (slot * push.n_columns + column) * conv_dim + channel];
        }
    }
    if (first > 0u) {  // apart, so that decoding has its loads under way together
        [[unroll]] for (uint j = 0u; j < MAX_TAPS; ++j) {
            uint back = MAX_TAPS - 1u - j;
            if (back > 0u && back < TAPS && back <= first) {
                tap.past[j] = p[push.qkv_at + (row0 + first - back) * push.p_row + channel];
            }
        }
    }
    return tap;
}

float convolve(inout Tap tap, float x) {
    tap.past[MAX_TAPS - 1u] = x;
    float sum = 0.0;
    [[unroll]] for (uint j = 0u; j < MAX_TAPS; ++j) { sum = fma(tap.past[j], tap.weight[j], sum); }
    [[unroll]] for (uint j = 0u; j + 1u < MAX_TAPS; ++j) { tap.past[j] = tap.past[j + 1u]; }
    return silu(sum);
}

// softplus, with no exp that overflows
float softplus(float x) { return max(x, 0.0) + log(1.0 + exp(-abs(x))); }
