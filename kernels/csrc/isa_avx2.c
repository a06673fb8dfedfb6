/* AVX2: the product of integers by hand, the rest from portable.h. Rounding is that of the portable kernels, so the bits
 * are theirs too. */
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#pragma GCC diagnostic ignored "-Wunused-function"

#define QS_NAME(name) qs_avx2_##name
#include "portable.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define ROWS 4
#define BYTE_ROWS 2 /* they need two sums each */
#define HALVES 2 /* vectors of a tile */
#define SPAN 32  /* inputs whose products with nibbles, 8 pairs of at most 2 * 15 * 128, an int16 sum holds */

#include "by_tile.h"

INLINE __m256i four(const int8_t *x)
{
    return _mm256_set1_epi32(*(const int32_t *)(const void *)x);
}

/* What each pair of nibbles and inputs adds to an int16 sum. */
INLINE __m256i add_pairs(__m256i sum, __m256i nibbles, __m256i x)
{
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, x));
}

/* One activation group of `rows` rows by one tile. The product of bytes and signed bytes saturates, that of nibbles does
 * not: a byte is its low nibble and 16 times its high one, each with a sum of its own. */
INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, float sums[ROWS][QS_LANES], const int rows,
                      const int u4)
{
    const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
    const uint8_t *w = at->w;
    __m256i dot[ROWS][HALVES];
    UNROLL for (int v = 0; v < HALVES; v++) {
        __m256i zeros = at->zeros ? _mm256_loadu_si256((const __m256i *)(at->zeros + 8 * v)) : _mm256_set1_epi32(zero);
        UNROLL for (int m = 0; m < rows; m++)
            dot[m][v] = _mm256_mullo_epi32(_mm256_set1_epi32(-at->x_sums[m * at->groups]), zeros);
    }
    for (int32_t j = 0; j < width;) {
        int32_t end = width - j < SPAN ? width : j + SPAN;
        __m256i first[ROWS][HALVES], second[ROWS][HALVES]; /* second: of the high nibbles of bytes */
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int v = 0; v < HALVES; v++)
                first[m][v] = second[m][v] = _mm256_setzero_si256();
        for (; j < end; j += u4 ? 8 : 4, w += 64) {
            __m256i lows[HALVES], highs[HALVES];
            UNROLL for (int v = 0; v < HALVES; v++) {
                __m256i codes = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
                lows[v] = _mm256_and_si256(codes, low);
                highs[v] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
            }
            UNROLL for (int m = 0; m < rows; m++) {
                const int8_t *x = at->x + m * at->x_stride + j;
                UNROLL for (int v = 0; v < HALVES; v++) {
                    first[m][v] = add_pairs(first[m][v], lows[v], four(x));
                    if (u4)
                        first[m][v] = add_pairs(first[m][v], highs[v], four(x + 4));
                    else
                        second[m][v] = add_pairs(second[m][v], highs[v], four(x));
                }
            }
        }
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int v = 0; v < HALVES; v++) {
                dot[m][v] = _mm256_add_epi32(dot[m][v], _mm256_madd_epi16(first[m][v], one));
                if (!u4)
                    dot[m][v] = _mm256_add_epi32(dot[m][v], _mm256_madd_epi16(second[m][v], sixteen));
            }
    }
    UNROLL for (int v = 0; v < HALVES; v++) {
        __m256 scale = at->scales ? _mm256_loadu_ps(at->scales + 8 * v)
                                  : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at->halves + 8 * v)));
        UNROLL for (int m = 0; m < rows; m++) {
            __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[m][v]), scale);
            product = _mm256_mul_ps(product, _mm256_set1_ps(at->x_scales[m * at->groups]));
            _mm256_storeu_ps(sums[m] + 8 * v, _mm256_add_ps(_mm256_loadu_ps(sums[m] + 8 * v), product));
        }
    }
}

const qs_kernels qs_kernels_avx2 = {
    .rmsnorm = QS_NAME(rmsnorm),
    .silu_mul = QS_NAME(silu_mul),
    .log_softmax = QS_NAME(log_softmax),
    .argmax = QS_NAME(argmax),
    .quantize = QS_NAME(quantize),
    .round_input = QS_NAME(round_input),
    .linear_int = linear_int,
    .linear_float = QS_NAME(linear_float),
    .rope_kv = QS_NAME(rope_kv),
    .attend = QS_NAME(attend),
    .search_scale = QS_NAME(search_scale),
    .sweep = QS_NAME(sweep),
};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
