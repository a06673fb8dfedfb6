/* Products of bfloat16, for calibration, in tiles of AMX. */
#include "products.h"

#ifdef QS_AMX_TILES
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512,amx-tile,amx-bf16")
#endif

#define TILE 16  /* rows, and columns of four bytes */
#define ROWS 32  /* by two tiles: four sums, which share what they multiply */
#define PAIRS 16 /* of a tile */
#define STEP 128 /* pairs of rows whose products stay in registers: both sides of them lie in the caches of a core */
#include "amx_tiles.h"
#include "products_bf16.h"

static void shape_tiles(void)
{
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++)
        shapes.rows[i] = TILE, shapes.bytes[i] = 64;
    written(&shapes);
    _tile_loadconfig(&shapes);
}

/* Two tiles of rows by two of columns. */
INLINE void multiply_tiles(const uint16_t *left, int64_t row, const uint16_t *right, int64_t pairs, float *sums,
                           int64_t apart)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t pair = 0; pair < pairs; pair += PAIRS, left += 2 * PAIRS, right += 2 * PAIRS * PANEL) {
        _tile_loadd(6, right, 4 * PANEL);
        _tile_loadd(4, left, 2 * row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + 2 * TILE, 4 * PANEL);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + TILE * row, 2 * row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * apart);
    _tile_stored(1, sums + TILE, 4 * apart);
    _tile_stored(2, sums + TILE * apart, 4 * apart);
    _tile_stored(3, sums + TILE * apart + TILE, 4 * apart);
}

INLINE void multiply_rows(const uint16_t *left, int64_t row, const uint16_t *right, int64_t pairs, float *sums,
                          int64_t apart)
{
    written(left);
    multiply_tiles(left, row, right, pairs, sums, apart);
    multiply_tiles(left, row, right + 4 * TILE, pairs, sums + 2 * TILE, apart);
}

/* Sixteen by sixteen words of four bytes change places: rows of `in` 4 * PANEL bytes apart, those of `out` 4 * STEP. */
INLINE void turn(const uint16_t *in, uint16_t *out, int32_t rows)
{
    __m512i a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++)
        a[i] = i < rows ? _mm512_loadu_si512(in + i * 2 * PANEL) : _mm512_setzero_si512();
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
        UNROLL for (int k = 0; k < 2; k++) {
            a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + 2 + k]);
            a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + 2 + k]);
        }
    /* a[4 q + c]: in each part p of 128 bits column 4 p + c of rows 4 q to 4 q + 3 */
    UNROLL for (int c = 0; c < 4; c++) {
        b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        _mm512_storeu_si512(out + (0 + c) * 2 * STEP, _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88));
        _mm512_storeu_si512(out + (8 + c) * 2 * STEP, _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd));
        _mm512_storeu_si512(out + (4 + c) * 2 * STEP, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88));
        _mm512_storeu_si512(out + (12 + c) * 2 * STEP, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd));
    }
}

/* Some pairs of a panel, at most STEP, as rows of 2 * STEP numbers; zeros behind them. */
static void turn_panel(const uint16_t *panel, int64_t pairs, uint16_t *turned)
{
    for (int64_t pair = 0; pair < pairs; pair += PAIRS)
        for (int32_t column = 0; column < PANEL; column += TILE)
            turn(panel + pair * 2 * PANEL + 2 * column, turned + column * 2 * STEP + 2 * pair,
                 pairs - pair < PAIRS ? (int32_t)(pairs - pair) : PAIRS);
}

/* Adds the products of `pairs` pairs, full tiles of them, to a tile of the moments. */
static void add_step(const qs_moment *op, int32_t i, int32_t j, const uint16_t *turned, const uint16_t *right,
                     int64_t pairs, float keep)
{
    float sums[ROWS * PANEL] __attribute__((aligned(64)));
    const __m512 kept = _mm512_set1_ps(keep), gain = _mm512_set1_ps(op->gain);
    for (int32_t r = 0; r < PANEL && i * PANEL + r < op->height; r += ROWS) {
        multiply_rows(turned + r * 2 * STEP, 2 * STEP, right, pairs, sums, PANEL);
        for (int32_t m = 0; m < ROWS && i * PANEL + r + m < op->height; m++) {
            float *out = op->out + (int64_t)(i * PANEL + r + m) * op->width + j * PANEL;
            for (int v = 0; v < 4; v++) {
                int32_t columns = op->width - j * PANEL - 16 * v;
                __mmask16 mask = columns >= 16 ? 0xffff : columns > 0 ? (__mmask16)((1u << columns) - 1) : 0;
                __m512 before = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, out + 16 * v), kept);
                __m512 sum = _mm512_load_ps(sums + m * PANEL + 16 * v);
                _mm512_mask_storeu_ps(out + 16 * v, mask, _mm512_fmadd_ps(sum, gain, before));
            }
        }
    }
}

static void add_tiles(const qs_moment *op, int32_t i, int32_t start, int32_t end)
{
    uint16_t turned[PANEL * 2 * STEP] __attribute__((aligned(64))), whole[PANEL * 2 * STEP] __attribute__((aligned(64)));
    const int64_t all = (op->count + 1) / 2, stride = all * 2 * PANEL;
    const uint16_t *left = op->left, *right = op->right;
    shape_tiles();
    for (int64_t from = 0; from < all; from += STEP) {
        const int64_t pairs = all - from < STEP ? all - from : STEP, padded = (pairs + PAIRS - 1) / PAIRS * PAIRS;
        turn_panel(left + i * stride + from * 2 * PANEL, pairs, turned);
        for (int32_t j = start; j < end; j++) {
            const uint16_t *panel = right + j * stride + from * 2 * PANEL;
            if (padded != pairs) {
                memset(whole, 0, sizeof whole);
                panel = memcpy(whole, panel, sizeof(uint16_t) * 2 * PANEL * (size_t)pairs);
            }
            add_step(op, i, j, turned, panel, padded, from ? 1.0f : op->keep);
        }
    }
    _tile_release();
}

/* Where tiles are full, else in vectors. */
static int32_t attend_in_tiles(const qs_causal *op, int64_t first, int64_t items)
{
    if (op->head_dim % (2 * PAIRS) || op->tokens % (2 * PAIRS))
        return qs_products_bf16.attend(op, first, items);
    shape_tiles();
    int32_t found = attend(op, first, items);
    _tile_release();
    return found;
}

const qs_products qs_products_tiles = {.pack = pack, .add_tiles = add_tiles, .attend = attend_in_tiles};
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
