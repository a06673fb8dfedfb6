/* Products of bfloat16, for calibration, with AVX512-BF16: what those of vectors and those of tiles share. Before it is
 * included `ROWS` and `PAIRS` are defined; behind it, `multiply_rows`. */
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define PANEL QS_BF16_PANEL /* four registers */

/* ROWS rows of pairs, `row` numbers apart, by a panel of `right`, over `pairs` pairs, a multiple of PAIRS: to
 * `sums` [ROWS][apart]. */
INLINE void multiply_rows(const uint16_t *left, int64_t row, const uint16_t *right, int64_t pairs, float *sums,
                          int64_t apart);

/* 32 columns of a row: as floats, and rounded. */
typedef struct {
    __m512 low, high;
    __m512i rounded;
} columns;

INLINE __m512 widened(__m256i half)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE columns load_columns(const void *row, __mmask32 mask, const int f32)
{
    columns found;
    if (f32) {
        found.low = _mm512_maskz_loadu_ps((__mmask16)mask, row);
        found.high = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), (const float *)row + 16);
        found.rounded = (__m512i)_mm512_cvtne2ps_pbh(found.high, found.low);
    } else {
        found.rounded = _mm512_maskz_loadu_epi16(mask, row);
        found.low = widened(_mm512_castsi512_si256(found.rounded));
        found.high = widened(_mm512_extracti64x4_epi64(found.rounded, 1));
    }
    return found;
}

INLINE void pack_columns(const qs_pack *op, int32_t panel, int32_t half, __mmask32 mask, const int f32)
{
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                           39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    int64_t pairs = (op->count + 1) / 2, at = mask ? panel * PANEL + half : 0, size = f32 ? 4 : 2;
    const char *in = (const char *)op->rows + at * size;
    uint16_t *out = (uint16_t *)op->packed + (panel * pairs * PANEL + half) * 2;
    __m512 top[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, sum[2] = {top[0], top[0]};
    for (int64_t pair = 0; pair < pairs; pair++, in += 2 * op->stride * size, out += 2 * PANEL) {
        columns even = load_columns(in, mask, f32);
        columns odd = load_columns(in + op->stride * size, 2 * pair + 1 < op->count ? mask : 0, f32);
        _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even.rounded, first, odd.rounded));
        _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(even.rounded, second, odd.rounded));
        if (!op->absmax)
            continue;
        even.low = _mm512_abs_ps(even.low), even.high = _mm512_abs_ps(even.high);
        odd.low = _mm512_abs_ps(odd.low), odd.high = _mm512_abs_ps(odd.high);
        top[0] = _mm512_max_ps(top[0], _mm512_max_ps(even.low, odd.low));
        top[1] = _mm512_max_ps(top[1], _mm512_max_ps(even.high, odd.high));
        sum[0] = _mm512_add_ps(sum[0], _mm512_add_ps(even.low, odd.low));
        sum[1] = _mm512_add_ps(sum[1], _mm512_add_ps(even.high, odd.high));
    }
    for (int v = 0; op->absmax && mask && v < 2; v++) {
        __mmask16 part = (__mmask16)(mask >> 16 * v);
        float *most = op->absmax + at + 16 * v, *total = op->abssum + at + 16 * v;
        _mm512_mask_storeu_ps(most, part, _mm512_max_ps(_mm512_maskz_loadu_ps(part, most), top[v]));
        _mm512_mask_storeu_ps(total, part, _mm512_add_ps(_mm512_maskz_loadu_ps(part, total), sum[v]));
    }
}

static void pack(const qs_pack *op, int32_t first, int32_t panels)
{
    for (int32_t panel = first; panel < first + panels; panel++)
        for (int32_t half = 0; half < PANEL; half += 32) {
            int32_t left = op->width - panel * PANEL - half;
            __mmask32 mask = left >= 32 ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0;
            if (op->dtype == QS_F32)
                pack_columns(op, panel, half, mask, 1);
            else
                pack_columns(op, panel, half, mask, 0);
        }
}

/* 2^x for x <= 0, to 5e-5: more than enough for bfloat16. NaN stays NaN. */
INLINE __m512 exp2_lanes(__m512 x)
{
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.6181291e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Row `row` of a head, dim numbers, as bf16. */
INLINE void round_row(const qs_heads *from, const char *head, int64_t row, int32_t dim, uint16_t *to)
{
    const char *in = head + row * from->token * (from->dtype == QS_F32 ? 4 : 2);
    if (from->dtype != QS_F32) {
        memcpy(to, in, sizeof(uint16_t) * (size_t)dim);
        return;
    }
    for (int32_t j = 0; j < dim; j += 16) {
        __mmask16 mask = dim - j >= 16 ? 0xffff : (__mmask16)((1u << (dim - j)) - 1);
        __m512 values = _mm512_maskz_loadu_ps(mask, (const float *)(const void *)in + j);
        _mm256_mask_storeu_epi16(to + j, mask, (__m256i)_mm512_cvtneps_pbh(values));
    }
}

static const char *head_of(const qs_heads *from, int64_t batch, int64_t head)
{
    return (const char *)from->at + (batch * from->batch + head * from->head) * (from->dtype == QS_F32 ? 4 : 2);
}

/* Keys of one head: [panel of 64 keys][dim / 2][64][2], missing keys as zeros. */
static void pack_keys(const uint16_t *keys, int32_t tokens, int32_t dim, uint16_t *packed)
{
    int32_t padded = (tokens + PANEL - 1) / PANEL * PANEL;
    memset(packed, 0, sizeof(uint16_t) * (size_t)padded * (size_t)dim);
    for (int32_t key = 0; key < tokens; key++) {
        uint16_t *to = packed + (int64_t)(key / PANEL) * PANEL * dim + 2 * (key % PANEL);
        for (int32_t j = 0; j < dim; j += 2)
            memcpy(to + (int64_t)j * PANEL, keys + (int64_t)key * dim + j, 2 * sizeof(uint16_t));
    }
}

/* ROWS queries from `first` on; some may lie behind the last token. scores, weights [ROWS][padded]. */
static void attend_rows(const qs_causal *op, const uint16_t *queries, int32_t first, const uint16_t *keys,
                        const uint16_t *values, float *scores, uint16_t *weights, uint16_t *out)
{
    int32_t dim = op->head_dim, end = first + ROWS < op->tokens ? first + ROWS : op->tokens;
    int32_t panels = (end + PANEL - 1) / PANEL, padded = (op->tokens + PANEL - 1) / PANEL * PANEL;
    int64_t pairs = (op->tokens + 1) / 2, seen_pairs = ((end + 1) / 2 + PAIRS - 1) / PAIRS * PAIRS;
    const __m512 scale = _mm512_set1_ps(op->scale * 1.44269504088896341f), least = _mm512_set1_ps(-INFINITY);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    float sums[ROWS * PANEL] __attribute__((aligned(64)));
    __m512 inverse[ROWS];
    for (int32_t panel = 0; panel < panels; panel++)
        multiply_rows(queries + (int64_t)first * dim, dim, keys + (int64_t)panel * PANEL * dim, dim / 2,
                      scores + panel * PANEL, padded);
    for (int r = 0; r < ROWS; r++) {
        float *row = scores + r * padded;
        __m512 top = least, total = _mm512_setzero_ps();
        int32_t last = first + r;
        for (int32_t j = last / PANEL * PANEL; j < panels * PANEL; j += 16) { /* later keys are not seen */
            __mmask16 seen = _mm512_cmple_epi32_mask(lanes, _mm512_set1_epi32(last - j));
            _mm512_storeu_ps(row + j, _mm512_mask_mov_ps(least, seen, _mm512_loadu_ps(row + j)));
        }
        for (int32_t j = 0; j < panels * PANEL; j += 16)
            top = _mm512_max_ps(top, _mm512_loadu_ps(row + j));
        top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
        for (int32_t j = 0; j < panels * PANEL; j += 16) {
            __m512 weight = exp2_lanes(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + j), top), scale));
            total = _mm512_add_ps(total, weight);
            _mm256_storeu_si256((__m256i *)(void *)(weights + r * padded + j), (__m256i)_mm512_cvtneps_pbh(weight));
        }
        inverse[r] = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
    }
    for (int32_t from = 0; from < dim; from += PANEL) {
        multiply_rows(weights, padded, values + from * 2 * pairs, seen_pairs, sums, PANEL);
        for (int r = 0; r < end - first; r++)
            for (int v = 0; v < 4; v++) {
                int32_t columns = dim - from - 16 * v;
                __mmask16 mask = columns >= 16 ? 0xffff : columns > 0 ? (__mmask16)((1u << columns) - 1) : 0;
                _mm256_mask_storeu_epi16(out + (int64_t)(first + r) * op->heads * dim + from + 16 * v, mask,
                                         (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(sums + r * PANEL + 16 * v),
                                                                                       inverse[r])));
            }
    }
}

static void attend_group(const qs_causal *op, int64_t item, uint16_t *rows, uint16_t *keys, uint16_t *values,
                         float *scores, uint16_t *weights)
{
    int64_t batch = item / op->kv_heads, kv_head = item % op->kv_heads;
    int32_t group = op->heads / op->kv_heads, dim = op->head_dim, tokens = op->tokens;
    const char *head = head_of(&op->keys, batch, kv_head);
    for (int32_t row = 0; row < tokens; row++)
        round_row(&op->keys, head, row, dim, rows + (int64_t)row * dim);
    pack_keys(rows, tokens, dim, keys);
    qs_pack given = {.rows = head_of(&op->values, batch, kv_head), .packed = values, .stride = op->values.token,
                     .count = tokens, .width = dim, .dtype = op->values.dtype};
    pack(&given, 0, (dim + PANEL - 1) / PANEL);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        uint16_t *out = (uint16_t *)op->out + (batch * tokens * op->heads + h) * dim;
        head = head_of(&op->queries, batch, h);
        for (int32_t row = 0; row < tokens; row++)
            round_row(&op->queries, head, row, dim, rows + (int64_t)row * dim);
        for (int32_t row = 0; row < tokens; row += ROWS)
            attend_rows(op, rows, row, keys, values, scores, weights, out);
    }
}

static int32_t attend(const qs_causal *op, int64_t first, int64_t items)
{
    size_t dim = (size_t)op->head_dim, padded = (size_t)(op->tokens + PANEL - 1) / PANEL * PANEL;
    size_t wide = (dim + PANEL - 1) / PANEL * PANEL;
    float *scores = malloc(padded * (sizeof(float) * ROWS + sizeof(uint16_t) * (2 * dim + wide + ROWS)));
    if (!scores)
        return -2;
    uint16_t *weights = (uint16_t *)(scores + ROWS * padded), *rows = weights + ROWS * padded;
    uint16_t *keys = rows + padded * dim, *values = keys + padded * dim;
    memset(rows, 0, sizeof(uint16_t) * padded * dim); /* rows behind the last token are multiplied too */
    for (int64_t item = first; item < first + items; item++)
        attend_group(op, item, rows, keys, values, scores, weights);
    free(scores);
    return 0;
}

