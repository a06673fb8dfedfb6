/* AVX2 with FMA and F16C: vectors of 8 floats, and the product of integers from pairs of bytes. */
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
#include "avx2_vectors.h"
#include "rows.h"
#include "delta_vectors.h"
#include "attention.h"
#include "latent.h"
#include "store_tiles.h"
#include "linear_float.h"
#include "adapter_products.h"
#include "avx2_trellis.h"

#define ROWS 4
#define HALVES 2 /* vectors of a tile */
#define SPAN 32  /* inputs to an int16 sum of products with nibbles: 8 pairs of at most 2 * 15 * 128 */
#define BOOK_SPAN 16 /* the same with numbers of a codebook: 4 pairs of at most 2 * 31 * 128 */
#define SMALL_SPAN 8 /* the same with small bytes: 2 pairs of at most 2 * 63 * 128 */
#define HAS_SMALL 1

#include "linear_int.h"

INLINE __m256i four(const int8_t *x)
{
    return _mm256_set1_epi32(*(const int32_t *)(const void *)x);
}

/* Adds the products of each pair of nibbles and inputs to an int16 sum. In assembly because the compiler adds the
 * products first and spills the sums: with nibbles 98 GMAC/s a core instead of 105, with bytes 37 instead of 55. */
INLINE __m256i add_pairs(__m256i sum, __m256i nibbles, __m256i x)
{
    __m256i products;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(nibbles), "x"(x));
    return sum;
}

INLINE void add_dot(int32_t *dot, __m256i pairs, __m256i times)
{
    __m256i *at = (__m256i *)(void *)dot;
    _mm256_store_si256(at, _mm256_add_epi32(_mm256_load_si256(at), _mm256_madd_epi16(pairs, times)));
}

/* `width` inputs of `rows` rows by a tile of nibbles, which stand for numbers of `codebook` unless that is NULL. */
INLINE void dot_u4(const int8_t *x, int64_t x_stride, const uint8_t *w, int64_t ahead, int32_t width,
                   int32_t dots[ROWS][QS_LANES], const uint8_t *codebook, const int rows)
{
    const __m256i book = codebook ? both(codebook) : _mm256_setzero_si256();
    const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    __m256i pairs[ROWS][HALVES], codes[HALVES];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < HALVES; v++)
            pairs[m][v] = _mm256_setzero_si256();
    for (int32_t j = 0; j < width; j += 8, w += 64) {
        _mm_prefetch((const char *)w + ahead, _MM_HINT_T1);
        UNROLL for (int v = 0; v < HALVES; v++)
            codes[v] = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(w + 32 * v)), low);
        UNROLL for (int v = 0; codebook && v < HALVES; v++)
            codes[v] = _mm256_shuffle_epi8(book, codes[v]);
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i first = four(x + m * x_stride + j);
            UNROLL for (int v = 0; v < HALVES; v++)
                pairs[m][v] = add_pairs(pairs[m][v], codes[v], first);
        }
        UNROLL for (int v = 0; v < HALVES; v++)
            codes[v] = _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)(w + 32 * v)), 4), low);
        UNROLL for (int v = 0; codebook && v < HALVES; v++)
            codes[v] = _mm256_shuffle_epi8(book, codes[v]);
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i second = four(x + m * x_stride + j + 4);
            UNROLL for (int v = 0; v < HALVES; v++)
                pairs[m][v] = add_pairs(pairs[m][v], codes[v], second);
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < HALVES; v++)
            add_dot(dots[m] + 8 * v, pairs[m][v], one);
}

/* The same by half a tile of bytes. The product of bytes and signed bytes saturates, that of nibbles does not. So a
 * byte is split into its low nibble and 16 times its high one, each with its own sum. */
INLINE void dot_u8(const int8_t *x, int64_t x_stride, const uint8_t *w, int64_t ahead, int32_t width,
                   int32_t dots[ROWS][QS_LANES], int v, const int rows)
{
    const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
    __m256i lows[ROWS], highs[ROWS];
    UNROLL for (int m = 0; m < rows; m++)
        lows[m] = highs[m] = _mm256_setzero_si256();
    for (int32_t j = 0; j < width; j += 4, w += 64) {
        _mm_prefetch((const char *)w + ahead, _MM_HINT_T1);
        __m256i codes = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
        __m256i first = _mm256_and_si256(codes, low), second = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i four_inputs = four(x + m * x_stride + j);
            lows[m] = add_pairs(lows[m], first, four_inputs);
            highs[m] = add_pairs(highs[m], second, four_inputs);
        }
    }
    UNROLL for (int m = 0; m < rows; m++) {
        add_dot(dots[m] + 8 * v, lows[m], one);
        add_dot(dots[m] + 8 * v, highs[m], sixteen);
    }
}

/* The same by a tile of small bytes, of which SMALL_SPAN go into an int16 sum. */
INLINE void dot_small(const int8_t *x, int64_t x_stride, const uint8_t *w, int64_t ahead, int32_t width,
                      int32_t dots[ROWS][QS_LANES], const int rows)
{
    const __m256i one = _mm256_set1_epi16(1);
    __m256i sums[ROWS][HALVES], codes[2][HALVES];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < HALVES; v++)
            sums[m][v] = _mm256_load_si256((const __m256i *)(const void *)(dots[m] + 8 * v));
    for (int32_t j = 0; j < width; j += SMALL_SPAN, w += 128) {
        UNROLL for (int i = 0; i < 2; i++) {
            _mm_prefetch((const char *)w + 64 * i + ahead, _MM_HINT_T1);
            UNROLL for (int v = 0; v < HALVES; v++)
                codes[i][v] = _mm256_loadu_si256((const __m256i *)(const void *)(w + 64 * i + 32 * v));
        }
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i first = four(x + m * x_stride + j), second = four(x + m * x_stride + j + 4);
            UNROLL for (int v = 0; v < HALVES; v++) {
                __m256i pairs = add_pairs(_mm256_maddubs_epi16(codes[0][v], first), codes[1][v], second);
                sums[m][v] = _mm256_add_epi32(sums[m][v], _mm256_madd_epi16(pairs, one));
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < HALVES; v++)
            _mm256_store_si256((__m256i *)(void *)(dots[m] + 8 * v), sums[m][v]);
}

/* The same where nibbles stand for numbers of two bytes, by at most two rows. 32768 is taken from the numbers, so that
 * they are signed. Inputs are widened: a vector holds the products of two pairs of inputs and four outputs. */
INLINE void dot_wide(const int8_t *x, int64_t x_stride, const uint8_t *w, int64_t ahead, int32_t width,
                     int32_t dots[ROWS][QS_LANES], const uint8_t *codebook, const int rows)
{
    const __m256i book = both(codebook), high = _mm256_xor_si256(both(codebook + 16), _mm256_set1_epi8(-128));
    const __m256i low = _mm256_set1_epi8(15);
    __m256i pairs[2][2 * HALVES], numbers[2 * HALVES];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < 2 * HALVES; v++)
            pairs[m][v] = _mm256_setzero_si256();
    for (int32_t j = 0; j < width; j += 8, w += 64) {
        _mm_prefetch((const char *)w + ahead, _MM_HINT_T1);
        UNROLL for (int half = 0; half < 2; half++) {
            UNROLL for (int v = 0; v < HALVES; v++) {
                __m256i codes = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
                codes = _mm256_and_si256(half ? _mm256_srli_epi16(codes, 4) : codes, low);
                __m256i lows = _mm256_shuffle_epi8(book, codes), highs = _mm256_shuffle_epi8(high, codes);
                numbers[2 * v] = _mm256_unpacklo_epi8(lows, highs);
                numbers[2 * v + 1] = _mm256_unpackhi_epi8(lows, highs);
            }
            UNROLL for (int m = 0; m < rows; m++) {
                __m256i inputs = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(four(x + m * x_stride + j + 4 * half)));
                UNROLL for (int v = 0; v < 2 * HALVES; v++)
                    pairs[m][v] = _mm256_add_epi32(pairs[m][v], _mm256_madd_epi16(numbers[v], inputs));
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < HALVES; v++) {
            __m256i *at = (__m256i *)(void *)(dots[m] + 8 * v);
            __m256i sum = _mm256_hadd_epi32(pairs[m][2 * v], pairs[m][2 * v + 1]);
            _mm256_store_si256(at, _mm256_add_epi32(_mm256_load_si256(at), sum));
        }
}

INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, float sums[ROWS][QS_LANES], const int rows,
                      const int u4)
{
    int32_t dots[ROWS][QS_LANES] __attribute__((aligned(64)));
    UNROLL for (int m = 0; m < rows; m++) {
        int32_t sum = at->x_sums[m], lift = u4 == BOOK16 ? 32768 : 0;
        UNROLL for (int v = 0; v < HALVES; v++)
            _mm256_store_si256((__m256i *)(void *)(dots[m] + 8 * v), _mm256_set1_epi32(sum * (lift - zero)));
    }
    UNROLL for (int m = 0; m < rows && u4 == BOOK16; m += 2)
        dot_wide(at->x + m * at->x_stride, at->x_stride, at->w, m ? 0 : at->ahead, width, dots + m, at->codebook,
                 rows - m < 2 ? rows - m : 2);
    if (u4 == SMALL)
        dot_small(at->x, at->x_stride, at->w, at->ahead, width, dots, rows);
    const int32_t most = u4 == BOOK ? BOOK_SPAN : SPAN;
    for (int32_t j = 0; j < width && u4 != BOOK16 && u4 != SMALL; j += most) {
        int32_t span = width - j < most ? width - j : most;
        const uint8_t *w = at->w + (int64_t)j * (u4 ? 8 : 16);
        if (u4)
            dot_u4(at->x + j, at->x_stride, w, at->ahead, span, dots, u4 == BOOK ? at->codebook : NULL, rows);
        else
            UNROLL for (int v = 0; v < HALVES; v++)
                dot_u8(at->x + j, at->x_stride, w, at->ahead, span, dots, v, rows);
    }
    UNROLL for (int v = 0; v < HALVES; v++) {
        vf products[ROWS];
        UNROLL for (int m = 0; m < rows; m++)
            products[m] = _mm256_cvtepi32_ps(_mm256_load_si256((const __m256i *)(const void *)(dots[m] + 8 * v)));
        add_scaled(at, products, sums[0], QS_LANES, v, rows);
    }
}

#include "avx2_linear_int.h"
#include "vector_kernels.h"

const qs_kernels qs_kernels_avx2 = VECTOR_KERNELS(linear_many, 2 * BLOCK_ROWS, decode);
#ifdef QS_VNNI
const qs_kernels qs_kernels_vex = VECTOR_KERNELS(qs_vex_linear_int, 2 * BLOCK_ROWS, decode);
const qs_kernels qs_kernels_evex = VECTOR_KERNELS(qs_evex_linear_int, 2 * BLOCK_ROWS, decode);
#endif
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
