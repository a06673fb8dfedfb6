/* AVX-512 with VNNI: vectors of 16 floats, and the product of integers by dots of bytes. */
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,prefer-vector-width=512")
#endif
#pragma GCC diagnostic ignored "-Wunused-function"

#define QS_NAME(name) qs_avx512_##name
#include "portable.h"

#include "avx512_vectors.h"
#include "rows.h"
#include "delta_vectors.h"
#include "attention.h"
#include "latent.h"
#include "store_tiles.h"
#include "linear_float.h"
#include "adapter_products.h"
#include "avx2_trellis.h"
#include "avx512_linear_int.h"

#define KERNELS(INT, ROWS) \
    { \
        .rmsnorm = rmsnorm, \
        .add_rmsnorm = add_rmsnorm, \
        .layernorm = layernorm, \
        .activate = activate, \
        .soft_cap = soft_cap, \
        .log_softmax = log_softmax, \
        .argmax = argmax, \
        .quantize = quantize, \
        .round_input = QS_NAME(round_input), \
        .linear_int = INT, \
        .int_rows = ROWS, \
        .linear_float = linear_float, \
        .shrink = shrink, \
        .expand = expand, \
        .rope_kv = rope_kv, \
        .attend = attend, \
        .latent_kv = QS_NAME(latent_kv), \
        .attend_latent = attend_latent, \
        .finish_latent = finish_latent, \
        .search_scale = QS_NAME(search_scale), \
        .choose_scale = QS_NAME(choose_scale), \
        .route = QS_NAME(route), \
        .combine = QS_NAME(combine), \
        .sigmoid_mul = QS_NAME(sigmoid_mul), \
        .convolve = convolve, \
        .delta = delta, \
        .sweep = QS_NAME(sweep), \
        .trellis_bytes = QS_NAME(trellis_bytes), \
        .trellis_sweep = QS_NAME(trellis_sweep), \
        .decode = decode, \
        .draw = QS_NAME(draw), \
    }

const qs_kernels qs_kernels_avx512 = KERNELS(linear_int, 2 * INT_ROWS);
#ifdef QS_AMX_TILES
const qs_kernels qs_kernels_amx = KERNELS(qs_amx_linear_int, QS_LANES);
#endif
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
