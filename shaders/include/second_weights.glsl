// weights.glsl once more, for the second weight format of a kernel, W2_<FORMAT>: Chunk2, load_chunk2, unpack2.
// Ends with HAS_OFFSET as the second format has it.

#undef W_F32
#undef W_F16
#undef W_BF16
#undef W_Q8_0
#undef W_Q4_0
#undef W_Q4_1
#undef W_Q5_0
#undef W_Q5_1
#undef W_Q2_K
#undef W_Q3_K
#undef W_Q4_K
#undef W_Q5_K
#undef W_Q6_K
#undef W_IQ4_NL
#undef W_IQ4_XS
#undef W_MXFP4
#undef HALVES
#undef HAS_OFFSET
#undef HAS_NIBBLES
#undef HAS_PAIRS
#undef HAS_BITS

#if defined(W2_F32)
#define W_F32
#elif defined(W2_F16)
#define W_F16
#elif defined(W2_BF16)
#define W_BF16
#elif defined(W2_Q8_0)
#define W_Q8_0
#elif defined(W2_Q4_0)
#define W_Q4_0
#elif defined(W2_Q4_1)
#define W_Q4_1
#elif defined(W2_Q5_0)
#define W_Q5_0
#elif defined(W2_Q5_1)
#define W_Q5_1
#elif defined(W2_Q2_K)
#define W_Q2_K
#elif defined(W2_Q3_K)
#define W_Q3_K
#elif defined(W2_Q4_K)
#define W_Q4_K
#elif defined(W2_Q5_K)
#define W_Q5_K
#elif defined(W2_Q6_K)
#define W_Q6_K
#elif defined(W2_IQ4_NL)
#define W_IQ4_NL
#elif defined(W2_IQ4_XS)
#define W_IQ4_XS
#elif defined(W2_MXFP4)
#define W_MXFP4
#endif

#define Chunk Chunk2
#define load_chunk load_chunk2
#define load_piece load_piece2
#define load_scales load_scales2
#define unpack unpack2
#define weights weights2
#define VALUES VALUES2
#include "weights.glsl"
#undef Chunk
#undef load_chunk
#undef load_piece
#undef load_scales
#undef unpack
#undef weights
#undef VALUES
