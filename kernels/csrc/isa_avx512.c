/* AVX-512 with VNNI: the linear layers, attention and activation rounding by hand, the rest from portable.h. */
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

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

static void quantize_rows(const qs_linear *op, const float *x, int8_t *codes, float *scales, int32_t *sums)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    if (op->permutation || op->act_group % 16 || op->x_width != op->k) {
        QS_NAME(quantize)(op, x, codes, scales, sums);
        return;
    }
    for (int32_t start = 0, g = 0; start < op->k; start += op->act_span) {
        int32_t end = op->k - start < op->act_span ? op->k : start + op->act_span;
        __m512i top = _mm512_setzero_si512();
        float inverse;
        for (int32_t j = start; j < end; j += 16)
            top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_loadu_si512(x + j), magnitude));
        float scale = QS_NAME(span_scale)(op, _mm512_reduce_max_epu32(top), &inverse);
        __mmask16 keep = inverse == 0.0f ? 0 : 0xffff;
        for (int32_t part = start; part < end; part += op->act_group, g++) {
            __m512i sum = _mm512_setzero_si512();
            for (int32_t j = part; j < part + op->act_group; j += 16) {
                __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + j), _mm512_set1_ps(inverse));
                scaled = _mm512_min_ps(_mm512_max_ps(scaled, _mm512_set1_ps(-128.0f)), _mm512_set1_ps(127.0f));
                __m512i code = _mm512_maskz_cvtps_epi32(keep, scaled);
                sum = _mm512_add_epi32(sum, code);
                _mm_storeu_si128((__m128i *)(codes + j), _mm512_cvtepi32_epi8(code));
            }
            scales[g] = scale;
            sums[g] = _mm512_reduce_add_epi32(sum);
        }
    }
}

INLINE __m512 exp_lanes(__m512 x)
{
    __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504088896341f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    p = _mm512_scalef_ps(p, n);
    return _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ), _mm512_setzero_ps());
}

/* The portable one has its own exp; both are right to the last bits. */
INLINE __m512 silu(__m512 x)
{
    __m512 e = exp_lanes(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

INLINE __m512 load_floats(const void *values, int64_t at, const int dtype)
{
    if (dtype == QS_F32)
        return _mm512_loadu_ps((const float *)values + at);
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)values + at));
    if (dtype == QS_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* A 256th of 16 e4m3 numbers, exactly: their bits, moved to where float16 has them. NaN is not told apart. */
INLINE __m512 small_e4m3(__m128i codes)
{
    __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7); /* bits 15 and 14 are the sign */
    return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((int16_t)0xbfff)));
}

#include "avx512_linear.h"
#include "avx512_attention.h"

/* In one pass: each lane keeps its highest and where it saw it first. */
static int32_t argmax(const float *x, int32_t width)
{
    __m512 tops = _mm512_set1_ps(-INFINITY);
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), found = at;
    __mmask16 bad = 0, best;
    for (int32_t j = 0; j < width; j += QS_LANES, at = _mm512_add_epi32(at, _mm512_set1_epi32(QS_LANES))) {
        __mmask16 there = width - j >= QS_LANES ? 0xffff : (__mmask16)((1u << (width - j)) - 1);
        __m512 values = _mm512_maskz_loadu_ps(there, x + j);
        __mmask16 higher = _mm512_mask_cmp_ps_mask(there, values, tops, _CMP_GT_OQ);
        bad |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        tops = _mm512_mask_mov_ps(tops, higher, values);
        found = _mm512_mask_mov_epi32(found, higher, at);
    }
    if (bad)
        return -1;
    best = _mm512_cmp_ps_mask(tops, _mm512_set1_ps(_mm512_reduce_max_ps(tops)), _CMP_EQ_OQ);
    return _mm512_mask_reduce_min_epi32(best, found); /* 0 where nothing is above -inf */
}

static void silu_mul(const float *gate, const float *up, float *out, int32_t width)
{
    int32_t j = 0;
    for (; j + QS_LANES <= width; j += QS_LANES) {
        __m512 value = _mm512_mul_ps(silu(_mm512_loadu_ps(gate + j)), _mm512_loadu_ps(up + j));
        _mm512_storeu_ps(out + j, value);
    }
    QS_NAME(silu_mul)(gate + j, up + j, out + j, width - j);
}

/* Keys lie 16 values apart: only their rounding is worth vectors. */
static void rope_kv(const qs_rope_kv *op, float *row, int32_t position, int32_t slot, int32_t kv_head)
{
    if (op->kv_dtype != QS_F16 || op->head_dim % QS_LANES) {
        QS_NAME(rope_kv)(op, row, position, slot, kv_head);
        return;
    }
    int32_t dim = op->head_dim, offset = slot % QS_LANES;
    const float *k = QS_NAME(rotate_heads)(op, row, position, kv_head), *v = k + (int64_t)op->kv_heads * dim;
    int64_t base = ((int64_t)(slot / QS_LANES) * op->kv_heads + kv_head) * dim * QS_LANES;
    uint16_t *keys = (uint16_t *)op->k_cache + base + offset, *values = (uint16_t *)op->v_cache + base + offset * dim;
    for (int32_t j = 0; j < dim; j += QS_LANES) {
        uint16_t halves[QS_LANES];
        _mm256_storeu_si256((__m256i *)halves, _mm512_cvtps_ph(_mm512_loadu_ps(k + j), _MM_FROUND_TO_NEAREST_INT));
        for (int i = 0; i < QS_LANES; i++)
            keys[(j + i) * QS_LANES] = halves[i];
        _mm256_storeu_si256((__m256i *)(values + j),
                            _mm512_cvtps_ph(_mm512_loadu_ps(v + j), _MM_FROUND_TO_NEAREST_INT));
    }
}

const qs_kernels qs_kernels_avx512 = {
    .rmsnorm = qs_avx512_rmsnorm,
    .silu_mul = silu_mul,
    .log_softmax = qs_avx512_log_softmax,
    .argmax = argmax,
    .quantize = quantize_rows,
    .round_input = qs_avx512_round_input,
    .linear_int = linear_int,
    .linear_float = linear_float,
    .rope_kv = rope_kv,
    .attend = attend,
    .search_scale = qs_avx512_search_scale,
    .sweep = qs_avx512_sweep,
};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
