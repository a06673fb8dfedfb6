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
#include "vector_kernels.h"

const qs_kernels qs_kernels_avx512 = VECTOR_KERNELS(linear_int, 2 * INT_ROWS, decode);
#ifdef QS_AMX_TILES
const qs_kernels qs_kernels_amx = VECTOR_KERNELS(qs_amx_linear_int, QS_LANES, decode);
#endif
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
