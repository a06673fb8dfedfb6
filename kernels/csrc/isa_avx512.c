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
#define TILES 4      /* weight tiles of 16 outputs that one block covers */
#define FLOAT_ROWS 6 /* rows that one float block covers: 6 x 4 accumulators leave 8 registers */
#define INT_ROWS 4   /* rows of an integer block: 16 accumulators and 8 unpacked tiles; 6 rows are no faster */
#define UNPACK 32    /* from this many rows on, e4m3 tiles are unpacked once and reused */
#define FAR 16384    /* outputs, as of a vocabulary: written past the caches, which they would leave unread */
#define NEAR (128 << 10) /* bytes, a part of the second-level cache: further ahead nothing is fetched */

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

/* 16 outputs of a row, of which `lanes` there are. Whole vectors without a mask: what a masked store wrote is not
 * forwarded to loads. */
INLINE void store_lanes(const qs_linear *op, __m512 sums, float *out, int32_t lanes)
{
    if (lanes >= QS_LANES && op->n >= FAR && (uintptr_t)out % 64 == 0) {
        /* Others see it behind the fence that ends a piece. */
        _mm512_stream_ps(out, op->accumulate ? _mm512_add_ps(_mm512_loadu_ps(out), sums) : sums);
    } else if (lanes >= QS_LANES) {
        _mm512_storeu_ps(out, op->accumulate ? _mm512_add_ps(_mm512_loadu_ps(out), sums) : sums);
    } else {
        __mmask16 mask = (__mmask16)((1u << lanes) - 1);
        if (op->accumulate)
            sums = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sums);
        _mm512_mask_storeu_ps(out, mask, sums);
    }
}

INLINE __m512 with_bias(const qs_linear *op, __m512 sums, int32_t tile)
{
    int32_t start = tile * QS_LANES, lanes = op->n - start;
    if (!op->bias)
        return sums;
    return _mm512_add_ps(sums, _mm512_maskz_loadu_ps(lanes >= QS_LANES ? 0xffff : (__mmask16)((1u << lanes) - 1),
                                                     op->bias + start));
}

INLINE void store_sums(const qs_linear *op, __m512 sums, int32_t row, int32_t tile)
{
    int32_t start = tile * QS_LANES;
    float *out = op->out + (int64_t)row * op->out_stride + (op->silu ? tile / 2 * QS_LANES : start);
    sums = with_bias(op, sums, tile);
    if (op->silu && tile % 2) /* the gate waits where its product belongs */
        sums = _mm512_mul_ps(sums, silu(_mm512_loadu_ps(out)));
    store_lanes(op, sums, out, op->n - start);
}

/* A tile of gates and the one of their products. */
INLINE void store_product(const qs_linear *op, __m512 gate, __m512 up, int32_t row, int32_t tile)
{
    float *out = op->out + (int64_t)row * op->out_stride + tile / 2 * QS_LANES;
    _mm512_storeu_ps(out, _mm512_mul_ps(with_bias(op, up, tile + 1), silu(with_bias(op, gate, tile))));
}

/* sum + the dot of each four bytes of w (unsigned) and x (signed). In assembly because the compiler copies the
 * accumulators of the intrinsic and spills the copies inside of the loop: 205 GMAC/s a core where it gives 150. */
INLINE __m512i dot4(__m512i sum, __m512i w, __m512i x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}

INLINE __m512i four(const int8_t *x)
{
    return _mm512_set1_epi32(*(const int32_t *)(const void *)x);
}

/* Where an integer product of NV tiles reads and adds: advanced by one activation group at a time. */
typedef struct {
    const int8_t *x;        /* [rows][x_stride] */
    const int32_t *x_sums;  /* [rows][parts] */
    const float *x_scales;  /* [rows][parts] */
    const uint8_t *w;       /* [tiles][stride] */
    const float *scales;    /* [tiles][scale_stride], NULL where they are f16 */
    const uint16_t *halves;
    const int32_t *zeros;   /* like scales, or NULL */
    float *sums;            /* [rows][TILES][16] */
    int64_t x_stride, parts, stride, scale_stride;
    int64_t ahead;          /* bytes from the weights that are read to those fetched meanwhile; 0 for nothing */
    int64_t scales_ahead;   /* the same of the scales */
} int_walk;

/* One activation group of MR rows by NV tiles. The integer dot starts at -zero * sum(codes), so that the zero point
 * costs nothing inside; every path scales it by the same two products, so all paths give the same bits. */
INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, const int MR, const int NV, const int U4)
{
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t *w = at->w;
    __m512i dot[INT_ROWS][TILES], codes[TILES];
    UNROLL for (int m = 0; m < MR; m++) {
        int32_t sum = at->x_sums[m * at->parts];
        UNROLL for (int v = 0; v < NV; v++)
            dot[m][v] = at->zeros ? _mm512_mullo_epi32(_mm512_set1_epi32(-sum),
                                                       _mm512_loadu_si512(at->zeros + v * at->scale_stride))
                                  : _mm512_set1_epi32(-sum * zero);
    }
    for (int32_t j = 0; j < width; j += U4 ? 8 : 4, w += 64) {
        const int8_t *x = at->x + j;
        UNROLL for (int v = 0; v < NV; v++) {
            codes[v] = _mm512_loadu_si512(w + v * at->stride);
            _mm_prefetch(w + v * at->stride + at->ahead, _MM_HINT_T1);
            if (U4)
                codes[v] = _mm512_and_si512(codes[v], low);
        }
        UNROLL for (int m = 0; m < MR; m++) {
            __m512i first = four(x + m * at->x_stride);
            UNROLL for (int v = 0; v < NV; v++)
                dot[m][v] = dot4(dot[m][v], codes[v], first);
        }
        if (!U4)
            continue;
        UNROLL for (int v = 0; v < NV; v++)
            codes[v] = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w + v * at->stride), 4), low);
        UNROLL for (int m = 0; m < MR; m++) {
            __m512i second = four(x + m * at->x_stride + 4);
            UNROLL for (int v = 0; v < NV; v++)
                dot[m][v] = dot4(dot[m][v], codes[v], second);
        }
    }
    UNROLL for (int v = 0; v < NV; v++) {
        const float *scales = at->scales + v * at->scale_stride;
        const uint16_t *halves = at->halves + v * at->scale_stride;
        __m512 scale = at->scales ? _mm512_loadu_ps(scales)
                                  : _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
        _mm_prefetch((at->scales ? (const char *)scales : (const char *)halves) + at->scales_ahead, _MM_HINT_T1);
        UNROLL for (int m = 0; m < MR; m++) {
            float *sums = at->sums + (m * TILES + v) * QS_LANES;
            _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[m][v]), scale),
                                                  _mm512_set1_ps(at->x_scales[m * at->parts]),
                                                  _mm512_load_ps(sums)));
        }
    }
}

/* MR rows by NV tiles. The float sums are in memory: the accumulators of a group need the registers. */
INLINE void int_block(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t tile, const uint8_t *weight,
                      int64_t stride, int64_t ahead, const int MR, const int NV, const int U4)
{
    float sums[INT_ROWS * TILES * QS_LANES] __attribute__((aligned(64)));
    int64_t parts = op->k / op->act_group, groups = op->k / op->group, per_group = op->group / op->act_group;
    int_walk at = {
        .x = acts->codes + (int64_t)row * op->k,
        .x_sums = acts->sums + row * parts,
        .x_scales = acts->scales + row * parts,
        .w = weight,
        .scales = op->scale_dtype == QS_F16 ? NULL : (const float *)op->scales + tile * groups * QS_LANES,
        .halves = (const uint16_t *)op->scales + tile * groups * QS_LANES,
        .zeros = op->zeros ? op->zeros + tile * groups * QS_LANES : NULL,
        .sums = sums,
        .x_stride = op->k,
        .parts = parts,
        .stride = stride,
        .scale_stride = groups * QS_LANES,
        .ahead = ahead,
        .scales_ahead = ahead ? TILES * groups * QS_LANES * (op->scale_dtype == QS_F16 ? 2 : 4) : 0,
    };
    UNROLL for (int i = 0; i < MR * TILES; i++)
        _mm512_store_ps(sums + i * QS_LANES, _mm512_setzero_ps());
    for (int64_t p = 0; p < parts; p++) {
        int_group(&at, op->zero, op->act_group, MR, NV, U4);
        at.x += op->act_group;
        at.w += (int64_t)op->act_group * (U4 ? 8 : 16);
        at.x_sums++;
        at.x_scales++;
        if ((p + 1) % per_group == 0) {
            at.scales = at.scales ? at.scales + QS_LANES : NULL;
            at.halves += QS_LANES;
            at.zeros = at.zeros ? at.zeros + QS_LANES : NULL;
        }
    }
    UNROLL for (int m = 0; m < MR; m++) {
        const float *of_row = sums + m * TILES * QS_LANES;
        if (NV > 1 && op->silu)
            UNROLL for (int v = 0; v < NV; v += 2)
                store_product(op, _mm512_load_ps(of_row + v * QS_LANES), _mm512_load_ps(of_row + (v + 1) * QS_LANES),
                              row + m, tile + v);
        else
            UNROLL for (int v = 0; v < NV; v++)
                store_sums(op, _mm512_load_ps(of_row + v * QS_LANES), row + m, tile + v);
    }
}

#define INT_CASE(MR, NV, U4)                                                                                       \
    case MR:                                                                                                      \
        int_block(op, acts, row, tile, weight, stride, ahead, MR, NV, U4);                                       \
        break;

/* Rows of NV tiles; 4-bit codes are unpacked on the fly. */
#define INT_KERNEL(name, NV, U4)                                                                                  \
    static void name(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile,            \
                     const uint8_t *weight, int64_t stride, int64_t ahead)                                        \
    {                                                                                                             \
        for (; row < end; row += INT_ROWS, ahead = 0) /* fetched once */                                          \
            switch (end - row < INT_ROWS ? end - row : INT_ROWS) {                                                \
                INT_CASE(1, NV, U4)                                                                               \
                INT_CASE(2, NV, U4)                                                                               \
                INT_CASE(3, NV, U4)                                                                               \
                INT_CASE(4, NV, U4)                                                                               \
            }                                                                                                     \
    }

INT_KERNEL(u4_wide, 4, 1)
INT_KERNEL(u4_narrow, 1, 1)
INT_KERNEL(u8_wide, 4, 0)
INT_KERNEL(u8_narrow, 1, 0)

static void linear_int(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                       uint8_t *unpacked)
{
    int u4 = op->dtype == QS_U4, wide = tiles == TILES;
    int64_t stride = (int64_t)op->k * (u4 ? 8 : 16);
    const uint8_t *weight = (const uint8_t *)op->weight + tile * stride;
    /* Narrow tiles are too short for the processor to see a stream: the next piece, which is mostly this thread's, is
     * fetched meanwhile (measured on one row: 24 GB/s instead of 15; on tiles of 32 KB it does so by itself). */
    int64_t ahead = stride * tiles <= NEAR ? stride * tiles : 0;
    if (wide)
        (u4 ? u4_wide : u8_wide)(op, acts, row, end, tile, weight, stride, ahead);
    else
        for (int32_t t = 0; t < tiles; t++)
            (u4 ? u4_narrow : u8_narrow)(op, acts, row, end, tile + t, weight + t * stride, stride, ahead);
    _mm_sfence();
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

/* 16 cached values before their scale; those of f8 are a 256th. */
INLINE __m512 load_kv(const void *cache, int64_t at, const int dtype)
{
    const __m512 nan = _mm512_set1_ps(NAN);
    if (dtype == QS_F32 || dtype == QS_F16 || dtype == QS_BF16)
        return load_floats(cache, at, dtype);
    __m128i codes = _mm_loadu_si128((const __m128i *)((const uint8_t *)cache + at));
    if (dtype == QS_I8)
        return _mm512_mask_mov_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)),
                                  _mm_cmpeq_epi8_mask(codes, _mm_set1_epi8(-128)), nan);
    __mmask16 bad = _mm_cmpeq_epi8_mask(_mm_and_si128(codes, _mm_set1_epi8(0x7f)), _mm_set1_epi8(0x7f));
    return _mm512_mask_mov_ps(small_e4m3(codes), bad, nan);
}

/* `scale`: of e4m3 weights, times 256; else not read. */
INLINE __m512 load_weight(const void *weight, int64_t at, __m512 scale, const int dtype)
{
    if (dtype != QS_F8)
        return load_floats(weight, at, dtype);
    return _mm512_mul_ps(small_e4m3(_mm_loadu_si128((const __m128i *)((const uint8_t *)weight + at))), scale);
}

INLINE void float_block(const qs_linear *op, const float *input, const void *weight, int32_t row, int32_t tile,
                        const int MR, const int NV, const int dtype)
{
    __m512 sums[FLOAT_ROWS][TILES], scale[TILES];
    const float *x = input + (int64_t)row * op->k;
    int64_t stride = (int64_t)op->k * QS_LANES;
    int32_t group = dtype == QS_F8 ? op->group : op->k, groups = (op->k + group - 1) / group;
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            sums[m][v] = _mm512_setzero_ps();
    for (int32_t g = 0, k = 0; g < groups; g++) {
        int32_t end = op->k - k < group ? op->k : k + group;
        UNROLL for (int v = 0; v < NV; v++)
            scale[v] = dtype != QS_F8 ? _mm512_setzero_ps() : _mm512_mul_ps(
                _mm512_loadu_ps((const float *)op->scales + ((int64_t)(tile + v) * groups + g) * QS_LANES),
                _mm512_set1_ps(256.0f));
        for (; k < end; k++) {
            __m512 w[TILES];
            UNROLL for (int v = 0; v < NV; v++)
                w[v] = load_weight(weight, v * stride + (int64_t)k * QS_LANES, scale[v], dtype);
            UNROLL for (int m = 0; m < MR; m++) {
                __m512 value = _mm512_set1_ps(x[(int64_t)m * op->k + k]);
                UNROLL for (int v = 0; v < NV; v++)
                    sums[m][v] = _mm512_fmadd_ps(value, w[v], sums[m][v]);
            }
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        if (NV > 1 && op->silu)
            UNROLL for (int v = 0; v < NV; v += 2)
                store_product(op, sums[m][v], sums[m][v + 1], row + m, tile + v);
        else
            UNROLL for (int v = 0; v < NV; v++)
                store_sums(op, sums[m][v], row + m, tile + v);
}

#define FLOAT_CASE(MR, NV, dtype)                                                                                 \
    case MR:                                                                                                      \
        float_block(op, x, weight, row, tile, MR, NV, dtype);                                                    \
        break;
#define FLOAT_KERNEL(name, NV, dtype)                                                                             \
    static void name(const qs_linear *op, const float *x, int32_t row, int32_t end, int32_t tile,                 \
                     const void *weight)                                                                          \
    {                                                                                                             \
        for (; row < end; row += FLOAT_ROWS)                                                                      \
            switch (end - row < FLOAT_ROWS ? end - row : FLOAT_ROWS) {                                            \
                FLOAT_CASE(1, NV, dtype)                                                                          \
                FLOAT_CASE(2, NV, dtype)                                                                          \
                FLOAT_CASE(3, NV, dtype)                                                                          \
                FLOAT_CASE(4, NV, dtype)                                                                          \
                FLOAT_CASE(5, NV, dtype)                                                                          \
                FLOAT_CASE(6, NV, dtype)                                                                          \
            }                                                                                                     \
    }

FLOAT_KERNEL(f32_wide, 4, QS_F32)
FLOAT_KERNEL(f32_narrow, 1, QS_F32)
FLOAT_KERNEL(f16_wide, 4, QS_F16)
FLOAT_KERNEL(f16_narrow, 1, QS_F16)
FLOAT_KERNEL(bf16_wide, 4, QS_BF16)
FLOAT_KERNEL(bf16_narrow, 1, QS_BF16)
FLOAT_KERNEL(f8_wide, 4, QS_F8)
FLOAT_KERNEL(f8_narrow, 1, QS_F8)

/* Tiles of e4m3 as f32, the very products that f8_wide computes on the fly. */
static void unpack_f8(const qs_linear *op, int32_t tile, int32_t tiles, float *unpacked)
{
    const uint8_t *codes = (const uint8_t *)op->weight + (int64_t)tile * op->k * QS_LANES;
    int32_t groups = (op->k + op->group - 1) / op->group;
    for (int32_t t = tile; t < tile + tiles; t++)
        for (int32_t g = 0, k = 0; g < groups; g++) {
            int32_t end = op->k - k < op->group ? op->k : k + op->group;
            __m512 scale = _mm512_mul_ps(
                _mm512_loadu_ps((const float *)op->scales + ((int64_t)t * groups + g) * QS_LANES),
                _mm512_set1_ps(256.0f));
            for (; k < end; k++, codes += QS_LANES, unpacked += QS_LANES)
                _mm512_storeu_ps(unpacked, load_weight(codes, 0, scale, QS_F8));
        }
}

static void linear_float(const qs_linear *op, const float *x, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                         float *unpacked)
{
    typedef void (*kernel)(const qs_linear *, const float *, int32_t, int32_t, int32_t, const void *);
    static const kernel wide[] = {[QS_F32] = f32_wide, [QS_F16] = f16_wide, [QS_BF16] = bf16_wide, [QS_F8] = f8_wide};
    static const kernel narrow[] = {
        [QS_F32] = f32_narrow, [QS_F16] = f16_narrow, [QS_BF16] = bf16_narrow, [QS_F8] = f8_narrow};
    int dtype = op->dtype;
    int64_t stride = (int64_t)op->k * QS_LANES * (dtype == QS_F32 ? 4 : dtype == QS_F8 ? 1 : 2);
    const uint8_t *weight = (const uint8_t *)op->weight + tile * stride;
    if (dtype == QS_F8 && end - row >= UNPACK) {
        unpack_f8(op, tile, tiles, unpacked);
        weight = (const uint8_t *)unpacked;
        stride *= 4;
        dtype = QS_F32;
    }
    if (tiles == TILES)
        wide[dtype](op, x, row, end, tile, weight);
    else
        for (int32_t t = 0; t < tiles; t++)
            narrow[dtype](op, x, row, end, tile + t, weight + t * stride);
    _mm_sfence();
}

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

/* R query rows that share a key head, and what they have gathered so far: sums = the weighted values, and their total
 * weight, both relative to the highest score `top`. Rows lie at one distance from each other: a pointer each would need
 * a register each. */
typedef struct {
    float q[QS_MAX_QUERY_ROWS][256];
    float sums[QS_MAX_QUERY_ROWS][256] __attribute__((aligned(64)));
    float weights[QS_MAX_QUERY_ROWS][QS_LANES] __attribute__((aligned(64)));
    float total[QS_MAX_QUERY_ROWS][QS_LANES] __attribute__((aligned(64)));
    float top[QS_LANES] __attribute__((aligned(64)));
    uint32_t seen[QS_MAX_QUERY_ROWS];
} attended;

/* The weighted values of one block. `all`: every row sees every value from begin to end. */
INLINE void add_values(const qs_attention *op, attended *rows, int64_t base, int32_t begin, int32_t end, const int all,
                       const int R)
{
    for (int32_t j = 0; j < op->head_dim; j += QS_LANES) {
        __m512 sum[QS_MAX_QUERY_ROWS];
        UNROLL for (int r = 0; r < R; r++)
            sum[r] = _mm512_load_ps(rows->sums[r] + j);
        for (int32_t i = begin; i <= end; i++) {
            __m512 value = load_kv(op->v_cache, base + (int64_t)i * op->head_dim + j, op->kv_dtype);
            UNROLL for (int r = 0; r < R; r++)
                if (all || (rows->seen[r] >> i & 1)) /* what a row does not see must not touch it: it may be infinite */
                    sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(rows->weights[r][i]), value, sum[r]);
        }
        UNROLL for (int r = 0; r < R; r++)
            _mm512_store_ps(rows->sums[r] + j, sum[r]);
    }
}

/* Raises `top` to the highest of `scores`, and takes what was gathered relative to the old one along. */
INLINE void raise_top(attended *rows, const __m512 *scores, const uint32_t *higher, int32_t dim, const int R)
{
    float best[QS_LANES] __attribute__((aligned(64))), shrink[QS_LANES] __attribute__((aligned(64)));
    _mm512_store_ps(best, _mm512_load_ps(rows->top));
    UNROLL for (int r = 0; r < R; r++)
        if (higher[r])
            best[r] = _mm512_mask_reduce_max_ps((__mmask16)higher[r], scores[r]);
    _mm512_store_ps(shrink, exp_lanes(_mm512_sub_ps(_mm512_load_ps(rows->top), _mm512_load_ps(best))));
    _mm512_store_ps(rows->top, _mm512_load_ps(best));
    UNROLL for (int r = 0; r < R; r++) {
        __m512 by = _mm512_set1_ps(shrink[r]);
        if (!higher[r])
            continue;
        _mm512_store_ps(rows->total[r], _mm512_mul_ps(_mm512_load_ps(rows->total[r]), by));
        for (int32_t j = 0; j < dim; j += QS_LANES)
            _mm512_store_ps(rows->sums[r] + j, _mm512_mul_ps(_mm512_load_ps(rows->sums[r] + j), by));
    }
}

/* A block of 16 tokens at `base` in the caches; a score vector holds all of them: no horizontal sums. Every row sees
 * the tokens from begin to end where `all`, else those of `seen`. What comes `next` is fetched meanwhile. */
INLINE void attend_block(const qs_attention *op, attended *rows, int64_t base, int64_t next, float k_scale,
                         int32_t begin, int32_t end, const int all, const int R)
{
    const int32_t bytes = op->kv_dtype == QS_F32 ? 4 : op->kv_dtype == QS_F16 || op->kv_dtype == QS_BF16 ? 2 : 1;
    const int32_t step = QS_LANES * bytes, dim = op->head_dim;
    const char *next_k = (const char *)op->k_cache + next * bytes, *next_v = (const char *)op->v_cache + next * bytes;
    __m512 scores[QS_MAX_QUERY_ROWS];
    uint32_t higher[QS_MAX_QUERY_ROWS], any = 0;
    UNROLL for (int r = 0; r < R; r++)
        scores[r] = _mm512_setzero_ps();
    for (int32_t j = 0; j < dim; j++) {
        __m512 key = load_kv(op->k_cache, base + (int64_t)j * QS_LANES, op->kv_dtype);
        _mm_prefetch(next_k + j * step, _MM_HINT_T1);
        _mm_prefetch(next_v + j * step, _MM_HINT_T1);
        UNROLL for (int r = 0; r < R; r++)
            scores[r] = _mm512_fmadd_ps(_mm512_set1_ps(rows->q[r][j]), key, scores[r]);
    }
    UNROLL for (int r = 0; r < R; r++) {
        __mmask16 seen = all ? 0xffff : (__mmask16)rows->seen[r];
        scores[r] = _mm512_mul_ps(scores[r], _mm512_set1_ps(k_scale));
        any |= higher[r] = _mm512_mask_cmp_ps_mask(seen, scores[r], _mm512_set1_ps(rows->top[r]), _CMP_GT_OQ);
    }
    if (any)
        raise_top(rows, scores, higher, dim, R);
    UNROLL for (int r = 0; r < R; r++) {
        __m512 weight = exp_lanes(_mm512_sub_ps(scores[r], _mm512_set1_ps(rows->top[r])));
        if (!all)
            weight = _mm512_maskz_mov_ps((__mmask16)rows->seen[r], weight);
        _mm512_store_ps(rows->total[r], _mm512_add_ps(_mm512_load_ps(rows->total[r]), weight));
        _mm512_store_ps(rows->weights[r], weight);
    }
    add_values(op, rows, base, begin, end, all, R);
}

INLINE void attend_rows(const qs_attention *op, const qs_queries *queries, int32_t first_row,
                        const int32_t *block_table, int32_t kv_head, const int R)
{
    const int32_t dim = op->head_dim, *first = queries->first + first_row, *last = queries->last + first_row;
    const float lift = op->kv_dtype == QS_F8 ? 256.0f : 1.0f;
    const float k_scale = op->scale * (op->k_scale ? op->k_scale[kv_head] * lift : 1.0f);
    const float v_scale = op->v_scale ? op->v_scale[kv_head] * lift : 1.0f;
    int32_t from = first[0], to = last[0], all_from = first[0], all_to = last[0];
    attended rows;
    _mm512_store_ps(rows.top, _mm512_set1_ps(-1e30f));
    for (int r = 0; r < R; r++) {
        memcpy(rows.q[r], queries->q[first_row + r], sizeof(float) * (size_t)dim);
        memset(rows.sums[r], 0, sizeof(float) * (size_t)dim);
        _mm512_store_ps(rows.total[r], _mm512_setzero_ps());
        from = first[r] < from ? first[r] : from;
        to = last[r] > to ? last[r] : to;
        all_from = first[r] > all_from ? first[r] : all_from;
        all_to = last[r] < all_to ? last[r] : all_to;
    }
    const int32_t start = from / QS_LANES, stop = to / QS_LANES;
    for (int32_t block = start; block <= stop; block++) {
        const int32_t token = block * QS_LANES;
        int64_t base = ((int64_t)block_table[block] * op->kv_heads + kv_head) * dim * QS_LANES;
        /* A block further, or the first one of the next head. */
        int64_t next = block < stop ? ((int64_t)block_table[block + 1] * op->kv_heads + kv_head) * dim * QS_LANES
                                    : ((int64_t)block_table[start] * op->kv_heads + kv_head + 1) * dim * QS_LANES;
        if (token >= all_from && token + QS_LANES - 1 <= all_to) {
            attend_block(op, &rows, base, next, k_scale, 0, QS_LANES - 1, 1, R);
            continue;
        }
        for (int r = 0; r < R; r++) {
            int32_t lo = first[r] - token, hi = last[r] - token;
            uint32_t upto = hi < 0 ? 0 : (hi > 15 ? 0xffffu : (1u << (hi + 1)) - 1);
            rows.seen[r] = upto & ~(lo <= 0 ? 0 : (lo > 15 ? 0xffffu : (1u << lo) - 1));
        }
        attend_block(op, &rows, base, next, k_scale, from > token ? from - token : 0,
                     to < token + QS_LANES - 1 ? to - token : QS_LANES - 1, 0, R);
    }
    for (int r = 0; r < R; r++) {
        __m512 all = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(rows.total[r])));
        for (int32_t j = 0; j < dim; j += QS_LANES)
            _mm512_storeu_ps(queries->out[first_row + r] + j,
                             _mm512_mul_ps(_mm512_div_ps(_mm512_load_ps(rows.sums[r] + j), all),
                                           _mm512_set1_ps(v_scale)));
    }
}

#define ATTEND(R)                                                                                                 \
    static void attend_##R(const qs_attention *op, const qs_queries *queries, int32_t row, const int32_t *table,  \
                           int32_t kv_head)                                                                       \
    {                                                                                                             \
        attend_rows(op, queries, row, table, kv_head, R);                                                         \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)
ATTEND(6)
ATTEND(12)

static void attend(const qs_attention *op, const qs_queries *queries, const int32_t *block_table, int32_t kv_head)
{
    for (int32_t row = 0; row < queries->count;) {
        int32_t left = queries->count - row;
        int32_t take = left >= 12 ? 12 : left >= 6 ? 6 : left >= 4 ? 4 : left;
        (take == 12 ? attend_12 : take == 6 ? attend_6 : take == 4 ? attend_4 : take == 3 ? attend_3
         : take == 2 ? attend_2 : attend_1)(op, queries, row, block_table, kv_head);
        row += take;
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
};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
