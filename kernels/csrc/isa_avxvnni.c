/* AVX-VNNI, dots of bytes in vectors of 32: the integer product for the kernels of AVX2. */
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>

#include "internal.h"

#ifdef QS_VNNI
#ifdef QS_EVEX
#define DOT "vpdpbusd"
#define EXPORTED qs_evex_linear_int
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")
#endif
#else
#define DOT "%{vex%} vpdpbusd"
#define EXPORTED qs_vex_linear_int
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#endif
#pragma GCC diagnostic ignored "-Wunused-function"

#define QS_NAME(name) qs_vnni_##name
#include "portable.h"
#include "avx2_vectors.h"
#include "rows.h"
#include "store_tiles.h"

#define ROWS 6   /* 12 accumulators, two vectors of codes and an input: 15 of 16 registers */
#define HALVES 2 /* vectors of a tile */

#include "linear_int.h"

/* sum + the dot of each four bytes of w (unsigned) and x (signed). In assembly because with the intrinsic the compiler
 * copies the accumulators. */
INLINE __m256i dot4(__m256i sum, __m256i w, __m256i x)
{
    __asm__(DOT " %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
}

INLINE __m256i four(const int8_t *x)
{
    return _mm256_set1_epi32(*(const int32_t *)(const void *)x);
}

/* Adds the products of an activation group to `dot`. `book`: the numbers for which nibbles stand, where they do. */
INLINE void add_dots(const int_walk *at, int64_t ahead, int32_t width, __m256i book, __m256i dot[ROWS][HALVES],
                     const int rows, const int u4)
{
    const __m256i low = _mm256_set1_epi8(15);
    const uint8_t *w = at->w;
    __m256i other[ROWS][HALVES], codes[HALVES]; /* other: second sums: few rows need not wait */
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < HALVES; v++)
            other[m][v] = _mm256_setzero_si256();
    for (int32_t j = 0; j < width; j += u4 ? 8 : 4, w += 64) {
        _mm_prefetch((const char *)w + ahead, _MM_HINT_T1);
        UNROLL for (int v = 0; v < HALVES; v++) {
            codes[v] = _mm256_loadu_si256((const __m256i *)(w + 32 * v));
            if (u4)
                codes[v] = _mm256_and_si256(codes[v], low);
            if (u4 >= BOOK)
                codes[v] = _mm256_shuffle_epi8(book, codes[v]);
        }
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i first = four(at->x + m * at->x_stride + j);
            UNROLL for (int v = 0; v < HALVES; v++)
                dot[m][v] = dot4(dot[m][v], codes[v], first);
        }
        if (!u4)
            continue;
        UNROLL for (int v = 0; v < HALVES; v++) {
            codes[v] = _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)(w + 32 * v)), 4), low);
            if (u4 >= BOOK)
                codes[v] = _mm256_shuffle_epi8(book, codes[v]);
        }
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i second = four(at->x + m * at->x_stride + j + 4);
            UNROLL for (int v = 0; v < HALVES; v++)
                if (rows <= 2)
                    other[m][v] = dot4(other[m][v], codes[v], second);
                else
                    dot[m][v] = dot4(dot[m][v], codes[v], second);
        }
    }
    UNROLL for (int m = 0; m < rows && rows <= 2; m++)
        UNROLL for (int v = 0; v < HALVES; v++)
            dot[m][v] = _mm256_add_epi32(dot[m][v], other[m][v]);
}

INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, float sums[ROWS][QS_LANES], const int rows,
                      const int u4)
{
    __m256i dot[ROWS][HALVES];
    if (u4 == BOOK16) { /* 256 times the product of high bytes comes first */
        UNROLL for (int i = 0; i < rows * HALVES; i++)
            dot[i / HALVES][i % HALVES] = _mm256_setzero_si256();
        add_dots(at, 0, width, both(at->codebook + 16), dot, rows, u4);
    }
    UNROLL for (int m = 0; m < rows; m++) {
        __m256i start = _mm256_set1_epi32(-at->x_sums[m] * zero);
        UNROLL for (int v = 0; v < HALVES; v++)
            dot[m][v] = u4 == BOOK16 ? _mm256_add_epi32(_mm256_slli_epi32(dot[m][v], 8), start) : start;
    }
    add_dots(at, at->ahead, width, u4 >= BOOK ? both(at->codebook) : _mm256_setzero_si256(), dot, rows, u4);
    UNROLL for (int v = 0; v < HALVES; v++) {
        vf products[ROWS];
        UNROLL for (int m = 0; m < rows; m++)
            products[m] = _mm256_cvtepi32_ps(dot[m][v]);
        add_scaled(at, products, sums[0], QS_LANES, v, rows);
    }
}

void EXPORTED(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
              uint8_t *unpacked)
{
    linear_int(op, acts, row, end, tile, tiles, unpacked);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
#endif
