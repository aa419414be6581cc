// Products of weight matrices with 1..16 rows of x: what does not depend on the format of the weights (see rows_sums.glsl).
//
// `split` teams share N_R weight rows: a lane takes every (8 * split)-th chunk of 16 columns, for all TOKENS rows of x; lanes
// are summed by team_add, teams in their order. That order is the same whatever TOKENS and N_R are, which is what makes
// decoding independent of the batch.
//
// With a norm it costs no pass of its own: y = (W (x * norm)) / sqrt(mean(x^2) + eps), and the squares are summed beside the
// products. With groups, groups of columns of x are scaled likewise, their sums of squares being given.
//
// The including kernel defines the constants TOKENS and N_R, includes lanes.glsl and declares
//   vec4 x_quad(Product p, uint t, uint i), vec4 norm_quad(uint i)     i in quads of 4 columns
//   float square(uint i), float residual(uint i), void put_y(uint i, float value)     i in words
//   GROUP_SCALE(p, t, column)                                          group_scale(), or what it gave
// and the macros HAS_NORM(p), HAS_GROUPS(p), HAS_RESIDUAL(p), HAS_SWIGLU(p).

struct Product {
    uvec3 planes;
    uint n_in, n_out, split;
    uint x_at, x_row, y_at, y_row;
    uint norm_at;  // or where the sums of squares are
    float eps;
    uint residual_at, residual_row, group_size, group_parts, flags;
};

shared float team_sums[TEAMS * N_R * TOKENS];
shared float team_squares[TEAMS * TOKENS];

// The teams of a warp take the same columns of different weight rows, so that they read the same x.
uint slots(Product p) { return TEAMS / p.split; }

uint rows_of_group(Product p) { return slots(p) * N_R; }  // weight rows that a workgroup takes at a time

float group_scale(Product p, uint t, uint column) {
    uint n_groups = p.n_in / p.group_size;
    uint at = p.norm_at + (t * n_groups + column / p.group_size) * p.group_parts;
    float sum = 0.0;
    for (uint i = 0u; i < p.group_parts; ++i) { sum += square(at + i); }
    precise float mean = sum / float(p.group_size) + p.eps;
    return inversesqrt(mean);
}

// A team's sums, to shared memory.
void keep_sums(Product p, float sums[N_R][TOKENS], float squares[TOKENS]) {
    [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
        if (HAS_NORM(p)) {
            float square_sum = team_add(squares[t]);
            if (LANE == 0u) { team_squares[TEAM * TOKENS + t] = square_sum; }
        }
        [[unroll]] for (uint r = 0u; r < N_R; ++r) {
            float value = team_add(sums[r][t]);
            if (LANE == 0u) { team_sums[(TEAM * N_R + r) * TOKENS + t] = value; }
        }
    }
}

// The value of weight row `row` of this workgroup's rows, for row t of x, before the epilogue.
float joined(Product p, uint row, uint t) {
    uint slot = row / N_R, r = row % N_R, n = slots(p);
    float sum = 0.0, squares = 0.0;
    for (uint i = 0u; i < p.split; ++i) {
        sum += team_sums[((slot + i * n) * N_R + r) * TOKENS + t];
        if (HAS_NORM(p)) { squares += team_squares[(slot + i * n) * TOKENS + t]; }
    }
    if (HAS_NORM(p)) {
        precise float mean = squares / float(p.n_in) + p.eps;
        sum *= inversesqrt(mean);
    }
    return sum;
}

// What the teams have kept becomes the results of the weight rows from `base` on. After a barrier.
void put_rows(Product p, uint base) {
    uint rows = rows_of_group(p);
    if (HAS_SWIGLU(p)) {
        for (uint i = gl_LocalInvocationIndex; i < rows / 2u * TOKENS; i += LOCAL_SIZE) {
            uint pair = i % (rows / 2u), t = i / (rows / 2u);
            if (base + 2u * pair < p.n_out) {
                float gate = joined(p, 2u * pair, t), up = joined(p, 2u * pair + 1u, t);
                put_y(p.y_at + t * p.y_row + base / 2u + pair, gate / (1.0 + exp(-gate)) * up);
            }
        }
    } else {
        for (uint i = gl_LocalInvocationIndex; i < rows * TOKENS; i += LOCAL_SIZE) {
            uint row = i % rows, t = i / rows;
            if (base + row < p.n_out) {
                precise float value = joined(p, row, t);  // scaling and adding are never contracted to a fma
                if (HAS_RESIDUAL(p)) { value += residual(p.residual_at + t * p.residual_row + base + row); }
                put_y(p.y_at + t * p.y_row + base + row, value);
            }
        }
    }
}
