/* The linear layers with AVX-512. Included by isa_avx512.c, behind what loads vectors and takes their exponentials. */

#define TILES 4      /* weight tiles of 16 outputs that one block covers */
#define FLOAT_ROWS 6 /* rows that one float block covers: 6 x 4 accumulators leave 8 registers */
#define INT_ROWS 4   /* rows of an integer block: 16 accumulators and 8 unpacked tiles; 6 rows are no faster */
#define UNPACK 32    /* from this many rows on, e4m3 tiles are unpacked once and reused */
#define FAR 16384    /* outputs, as of a vocabulary: written past the caches, which they would leave unread */
#define NEAR (128 << 10) /* bytes, a part of the second-level cache: further ahead nothing is fetched */

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
    if (op->n >= FAR)
        _mm_sfence();
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
    if (op->n >= FAR)
        _mm_sfence();
}
