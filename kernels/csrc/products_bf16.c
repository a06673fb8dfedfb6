/* Products of bfloat16, for calibration on processors that have them (AVX512-BF16). */
#include "products.h"

#ifdef QS_BF16_PRODUCTS
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")
#endif

#define ROWS 4   /* by four registers: sixteen sums, more than the cycles of an instruction */
#define PAIRS 1
#define STEP 128 /* pairs of rows whose products stay in registers: two panels of them lie in the second-level cache */
#include "products_bf16.h"

/* In assembly because with the intrinsic the compiler copies the sums, see avx512_linear_int.h. */
INLINE __m512 dot2(__m512 sum, __m512i left, __m512i right)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return sum;
}

/* ROWS rows of pairs, `row` and `step` numbers apart, by one panel of `right`, over `pairs` pairs. */
INLINE void block(const uint16_t *left, int64_t row, int64_t step, const uint16_t *right, int64_t pairs,
                  __m512 sums[ROWS][4])
{
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < 4; v++)
            sums[r][v] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++, left += step, right += 2 * PANEL) {
        __m512i values[4];
        UNROLL for (int v = 0; v < 4; v++)
            values[v] = _mm512_loadu_si512(right + 32 * v);
        UNROLL for (int r = 0; r < ROWS; r++) {
            __m512i one = _mm512_set1_epi32(*(const int32_t *)(const void *)(left + r * row));
            UNROLL for (int v = 0; v < 4; v++)
                sums[r][v] = dot2(sums[r][v], one, values[v]);
        }
    }
}

INLINE void multiply_rows(const uint16_t *left, int64_t row, const uint16_t *right, int64_t pairs, float *sums,
                          int64_t apart)
{
    __m512 found[ROWS][4];
    block(left, row, 2, right, pairs, found);
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < 4; v++)
            _mm512_storeu_ps(sums + r * apart + 16 * v, found[r][v]);
}

static void add_tile(const qs_moment *op, int32_t i, int32_t j)
{
    int64_t pairs = (op->count + 1) / 2, stride = pairs * 2 * PANEL;
    for (int64_t from = 0; from < pairs; from += STEP) {
        int64_t count = pairs - from < STEP ? pairs - from : STEP;
        const uint16_t *left = (const uint16_t *)op->left + i * stride + from * 2 * PANEL;
        const uint16_t *right = (const uint16_t *)op->right + j * stride + from * 2 * PANEL;
        __m512 keep = _mm512_set1_ps(from ? 1.0f : op->keep), gain = _mm512_set1_ps(op->gain);
        for (int32_t r = 0; r < PANEL && i * PANEL + r < op->height; r += ROWS) {
            __m512 sums[ROWS][4];
            block(left + 2 * r, 2, 2 * PANEL, right, count, sums);
            for (int m = 0; m < ROWS && i * PANEL + r + m < op->height; m++) {
                float *out = op->out + (int64_t)(i * PANEL + r + m) * op->width + j * PANEL;
                for (int v = 0; v < 4; v++) {
                    int32_t columns = op->width - j * PANEL - 16 * v;
                    __mmask16 mask = columns >= 16 ? 0xffff : columns > 0 ? (__mmask16)((1u << columns) - 1) : 0;
                    __m512 before = _mm512_maskz_loadu_ps(mask, out + 16 * v);
                    __m512 after = _mm512_fmadd_ps(sums[m][v], gain, _mm512_mul_ps(before, keep));
                    _mm512_mask_storeu_ps(out + 16 * v, mask, after);
                }
            }
        }
    }
}

static void add_tiles(const qs_moment *op, int32_t i, int32_t j, int32_t end)
{
    for (; j < end; j++)
        add_tile(op, i, j);
}

const qs_products qs_products_bf16 = {.pack = pack, .add_tiles = add_tiles, .attend = attend};
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
