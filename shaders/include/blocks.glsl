// Sums of products of a tile of weights with a tile of x, both in shared memory, transposed, 16 columns at a time. A
// workgroup of W_LANES x X_LANES invocations, each of which holds N_W x N_X sums.
//
// The including kernel defines these four constants (N_W and N_X multiples of 4) and includes weights.glsl first.

const uint TILE_W = W_LANES * N_W, TILE_X = X_LANES * N_X;
const uint W_PITCH = TILE_W / 4u + 1u, X_PITCH = TILE_X / 4u + 1u;  // vec4s

shared vec4 w_tile[16u * W_PITCH];
shared vec4 x_tile[16u * X_PITCH];

// The i-th row of an invocation: runs of four, so that a warp reads neighbouring vec4s.
uint spread_row(uint lane, uint lanes, uint i) { return (i / 4u) * lanes * 4u + lane * 4u + i % 4u; }

void put_weights(uint row, Chunk c) {
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        vec4 w = weights(c, i);
        [[unroll]] for (uint j = 0u; j < 4u; ++j) { w_tile[(4u * i + j) * W_PITCH + row / 4u][row % 4u] = w[j]; }
    }
}

void put_x(uint row, uint quad, vec4 v) {
    [[unroll]] for (uint j = 0u; j < 4u; ++j) { x_tile[(4u * quad + j) * X_PITCH + row / 4u][row % 4u] = v[j]; }
}

void add_products(uint w_lane, uint x_lane, inout float sums[N_W][N_X]) {
    [[unroll]] for (uint k = 0u; k < 16u; ++k) {
        vec4 a[N_W / 4u], b[N_X / 4u];
        [[unroll]] for (uint i = 0u; i < N_W / 4u; ++i) { a[i] = w_tile[k * W_PITCH + i * W_LANES + w_lane]; }
        [[unroll]] for (uint j = 0u; j < N_X / 4u; ++j) { b[j] = x_tile[k * X_PITCH + j * X_LANES + x_lane]; }
        [[unroll]] for (uint i = 0u; i < N_W; ++i) {
            [[unroll]] for (uint j = 0u; j < N_X; ++j) {
                sums[i][j] = fma(a[i / 4u][i % 4u], b[j / 4u][j % 4u], sums[i][j]);
            }
        }
    }
}
