/* Products of float32, for calibration on processors without products of bfloat16. */
#include <stdlib.h>
#include <string.h>

#include "products.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define PANEL QS_F32_PANEL /* a multiple of the rows and columns that each ISA multiplies at once */
#define STEP 96            /* rows whose products stay in registers: two panels of them lie near the first cache */
#define LONG_STEP 192      /* the same where only some columns of one panel stay there */
#define QUERIES 24         /* queries computed together, a multiple of the rows of each ISA */

#define QS_NAME(name) portable_##name
#define QS_TABLE qs_products_portable
#define LANES 4
typedef float portable_floats __attribute__((vector_size(16), aligned(4), may_alias));
#ifdef QS_ARM
#include <arm_neon.h>
#define VECTORS 4
#define ROWS 6 /* 24 sums of 32 registers */
INLINE portable_floats portable_fused(portable_floats sum, float one, portable_floats values)
{
    return vfmaq_n_f32(sum, values, one);
}
#else
#define VECTORS 2
#define ROWS 4
INLINE portable_floats portable_fused(portable_floats sum, float one, portable_floats values)
{
    return sum + one * values;
}
#endif
#include "products_f32.h"

#ifdef QS_X86
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define QS_NAME(name) avx2_##name
#define QS_TABLE qs_products_avx2
#define LANES 8
#define VECTORS 2
#define ROWS 6 /* twelve sums of sixteen registers, more than the cycles of an instruction */
typedef __m256 avx2_floats __attribute__((aligned(4), may_alias));
/* In assembly because with the intrinsic the compiler copies the sums. */
INLINE __m256 avx2_fused(__m256 sum, float one, __m256 values)
{
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(_mm256_set1_ps(one)), "x"(values));
    return sum;
}
#include "products_f32.h"
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#define QS_NAME(name) avx512_##name
#define QS_TABLE qs_products_avx512
#define LANES 16
#define VECTORS 3
#define ROWS 8 /* 24 sums of 32 registers */
typedef __m512 avx512_floats __attribute__((aligned(4), may_alias));
INLINE __m512 avx512_fused(__m512 sum, float one, __m512 values)
{
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_ps(one)), "v"(values));
    return sum;
}
#include "products_f32.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
