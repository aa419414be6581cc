#version 450
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "lanes.glsl"

// Several products of decoding, one after the other, in one dispatch: those of linear_rows, with the same results to the
// bit. Between two that depend on each other all workgroups wait (everyone.glsl), which costs less than a level of its own, and
// the first weights of the next product are under way meanwhile.
//
// What a product writes is read by other workgroups later in the same dispatch, so activations are coherent, and x comes
// through workgroup memory, a block of columns at a time. What to do is a table (vkbackend/ops/linear_chain.py).
layout(constant_id = 0) const uint TOKENS = 1u;
layout(constant_id = 1) const uint X_QUADS = 1024u;  // of 4 columns, for one block of x: all rows
layout(constant_id = 2) const uint MAX_SCALES = 1u;

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) readonly buffer Weights { uint w_words[]; };
layout(binding = 0) readonly buffer WeightQuads { uvec4 w_quads[]; };
layout(binding = 1) coherent buffer Values { float values[]; };
layout(binding = 1) coherent readonly buffer ValueQuads { vec4 value_quads[]; };
layout(binding = 2) readonly buffer Norms { vec4 norm_quads[]; };
layout(binding = 3) coherent buffer Counters { uint counters[]; };
layout(binding = 3) readonly buffer Table { uint entries[]; };
layout(binding = 4) buffer Status { uint status[]; };
layout(push_constant) uniform Push { uint table_at; uint n_products; uint counter_at; uint status_at; } push;

const uint N_R = 4u;     // weight rows that a team takes at a time
const uint ENTRY = 18u;  // words of a product in the table
const uint MAX_PRODUCTS = 24u;
const uint NORM = 1u, GROUPS = 2u, RESIDUAL = 4u, SWIGLU = 8u, WAIT = 16u, SECOND_FORMAT = 32u;  // flags

shared uint table[ENTRY * MAX_PRODUCTS];
shared vec4 x_block[X_QUADS];
shared float scales[MAX_SCALES];  // of groups of columns, for all rows of x

uint block_first = 0u;  // the first quad of the block in workgroup memory
uint block_quads = 1u;  // and how many a row has there

#define HAS_NORM(p) (((p).flags & NORM) != 0u)
#define HAS_GROUPS(p) (((p).flags & GROUPS) != 0u)
#define HAS_RESIDUAL(p) (((p).flags & RESIDUAL) != 0u)
#define HAS_SWIGLU(p) (((p).flags & SWIGLU) != 0u)
#define GROUP_SCALE(p, t, column) scales[(t) * ((p).n_in / (p).group_size) + (column) / (p).group_size]

float square(uint i) { return values[i]; }
float residual(uint i) { return values[i]; }
vec4 norm_quad(uint i) { return norm_quads[i]; }
void put_y(uint i, float value) { values[i] = value; }

#include "everyone.glsl"
#include "rows.glsl"

// Lanes read every fourth quad: this way from different banks.
uint bank_of(uint quad) { return quad ^ (quad >> 3 & 3u); }

vec4 x_quad(Product p, uint t, uint i) { return x_block[t * block_quads + bank_of(i - block_first)]; }

#include "weights.glsl"
#define ADD_CHUNK add_chunk
#define CHUNK Chunk
#define UNPACK unpack
#include "rows_sums.glsl"
#ifdef TWO_FORMATS
#include "second_weights.glsl"
#undef ADD_CHUNK
#undef CHUNK
#undef UNPACK
#define ADD_CHUNK add_chunk2
#define CHUNK Chunk2
#define UNPACK unpack2
#include "rows_sums.glsl"
#endif

Product product(uint i) {
    uint at = i * ENTRY;
    return Product(
        uvec3(table[at], table[at + 1u], table[at + 2u]), table[at + 3u], table[at + 4u], table[at + 15u],
        table[at + 5u], table[at + 6u], table[at + 7u], table[at + 8u],
        table[at + 9u], uintBitsToFloat(table[at + 10u]),
        table[at + 11u], table[at + 12u], table[at + 13u], table[at + 14u], table[at + 17u]);
}

// How far this workgroup is: product, weight rows of it (in turns with the other workgroups), and columns of these.
struct Place { uint product, rows, step; };

struct Loaded {
    Chunk first[N_R];
#ifdef TWO_FORMATS
    Chunk2 second[N_R];
#endif
};

uint chunks_of_step(Product p) { return LANES * p.split; }

uint chunk_of(Product p, uint step) { return TEAM / slots(p) * LANES + LANE + step * chunks_of_step(p); }

uint steps_of(Product p) { return (p.n_in / 16u + chunks_of_step(p) - 1u) / chunks_of_step(p); }

// Past the end of a row or of the matrix something is loaded and not used.
Loaded load(Place at) {
    Loaded w;
    Product p = product(at.product);
    uint first = at.rows * rows_of_group(p) + TEAM % slots(p) * N_R;
    uint chunk = min(chunk_of(p, at.step), p.n_in / 16u - 1u);
#ifdef TWO_FORMATS
    if ((p.flags & SECOND_FORMAT) != 0u) {
        [[unroll]] for (uint r = 0u; r < N_R; ++r) { w.second[r] = load_chunk2(p.planes, p.n_in, min(first + r, p.n_out - 1u), chunk); }
        return w;
    }
#endif
    [[unroll]] for (uint r = 0u; r < N_R; ++r) { w.first[r] = load_chunk(p.planes, p.n_in, min(first + r, p.n_out - 1u), chunk); }
    return w;
}

void bring_x(Product p, uint step, uint n_steps) {
    uint n_columns = min(p.n_in - step * chunks_of_step(p) * 16u, n_steps * chunks_of_step(p) * 16u);
    block_first = step * chunks_of_step(p) * 4u;
    block_quads = n_steps * chunks_of_step(p) * 4u;
    barrier();  // nobody reads the block before
    for (uint i = gl_LocalInvocationIndex; i < TOKENS * (n_columns / 4u); i += LOCAL_SIZE) {
        uint t = i / (n_columns / 4u), quad = i % (n_columns / 4u);
        x_block[t * block_quads + bank_of(quad)] = value_quads[(p.x_at + t * p.x_row) / 4u + block_first + quad];
    }
    if (HAS_GROUPS(p) && step == 0u) {
        uint n_groups = p.n_in / p.group_size;
        for (uint i = gl_LocalInvocationIndex; i < TOKENS * n_groups; i += LOCAL_SIZE) {
            scales[i] = group_scale(p, i / n_groups, i % n_groups * p.group_size);
        }
    }
    barrier();
}

void main() {
    for (uint i = gl_LocalInvocationIndex; i < ENTRY * push.n_products; i += LOCAL_SIZE) { table[i] = entries[push.table_at + i]; }
    barrier();
    uint n_waits = 0u;
    bool right = push.n_products > 0u || everyone(1u, push.counter_at);  // without products: can all wait for each other?
    float sums[N_R][TOKENS];
    float squares[TOKENS];
    Place at = Place(0u, WORKGROUP_INDEX, 0u);
    Loaded w;
    if (push.n_products > 0u) { w = load(at); }
    while (right && at.product < push.n_products) {
        Product p = product(at.product);
        bool begins = at.rows == WORKGROUP_INDEX && at.step == 0u;
        if (begins && (p.flags & WAIT) != 0u) {
            right = everyone(++n_waits, push.counter_at);
            if (!right) { break; }
        }
        uint n_steps = steps_of(p), steps_of_block = table[at.product * ENTRY + 16u];
        if (at.step % steps_of_block == 0u && (begins || n_steps > steps_of_block)) { bring_x(p, at.step, min(steps_of_block, n_steps)); }

        Place next = Place(at.product, at.rows, at.step + 1u);
        if (next.step == n_steps) {
            next = Place(at.product, at.rows + WORKGROUPS, 0u);
            if (next.rows * rows_of_group(p) >= p.n_out) { next = Place(at.product + 1u, WORKGROUP_INDEX, 0u); }
        }
        Loaded w_next;
        if (next.product < push.n_products) { w_next = load(next); }

        if (at.step == 0u) {
            [[unroll]] for (uint t = 0u; t < TOKENS; ++t) {
                squares[t] = 0.0;
                [[unroll]] for (uint r = 0u; r < N_R; ++r) { sums[r][t] = 0.0; }
            }
        }
        uint chunk = chunk_of(p, at.step);
        if (chunk < p.n_in / 16u) {
#ifdef TWO_FORMATS
            if ((p.flags & SECOND_FORMAT) != 0u) { add_chunk2(p, w.second, chunk, sums, squares); } else
#endif
            { add_chunk(p, w.first, chunk, sums, squares); }
        }
        if (at.step + 1u == n_steps) {
            barrier();  // the sums before are read
            keep_sums(p, sums, squares);
            barrier();
            put_rows(p, at.rows * rows_of_group(p));
        }
        w = w_next;
        at = next;
    }
    if (WORKGROUP_INDEX == 0u && gl_LocalInvocationIndex == 0u) { status[push.status_at] = right ? 1u : 0u; }
}
