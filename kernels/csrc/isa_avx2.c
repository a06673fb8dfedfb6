/* The portable kernels, vectorized for AVX2. */
#if defined(__x86_64__) || defined(__i386__)
#pragma GCC target("avx2,fma,f16c")
#define QS_NAME(name) qs_avx2_##name
#include "portable.h"

const qs_kernels qs_kernels_avx2 = {
    .rmsnorm = qs_avx2_rmsnorm,
    .silu_mul = qs_avx2_silu_mul,
    .log_softmax = qs_avx2_log_softmax,
    .argmax = qs_avx2_argmax,
    .quantize = qs_avx2_quantize,
    .linear_int = qs_avx2_linear_int,
    .linear_float = qs_avx2_linear_float,
    .rope_kv = qs_avx2_rope_kv,
    .attend = qs_avx2_attend,
};
#endif
