/* The product of integers with AVX-512 and VNNI, behind store_tiles.h. */

#define TILES 4      /* weight tiles of 16 outputs in one block */
#define INT_ROWS 6   /* rows of an integer block: 24 accumulators and 4 unpacked tiles */

/* sum + the dot of each four bytes of w (unsigned) and x (signed). In assembly because with the intrinsic the compiler
 * copies the accumulators and spills the copies inside the loop: 150 GMAC/s a core instead of 205. */
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
    const uint8_t *codebook;
    float *sums;            /* [rows][tiles][16] */
    int64_t x_stride, parts, stride, scale_stride;
    int64_t ahead;          /* bytes from the weights being read to those prefetched meanwhile; 0: none */
    int64_t scales_ahead;   /* the same of the scales */
} int_walk;

/* One activation group of MR rows by NV tiles. The integer dot starts at -zero * sum(codes), so that the zero point
 * costs nothing inside; every path scales it by the same two products, so all paths give the same bits. */
INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, const int MR, const int NV, const int U4)
{
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i book = U4 == BOOK ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)at->codebook)) : low;
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
            if (U4 == BOOK)
                codes[v] = _mm512_shuffle_epi8(book, codes[v]);
        }
        UNROLL for (int m = 0; m < MR; m++) {
            __m512i first = four(x + m * at->x_stride);
            UNROLL for (int v = 0; v < NV; v++)
                dot[m][v] = dot4(dot[m][v], codes[v], first);
        }
        if (!U4)
            continue;
        UNROLL for (int v = 0; v < NV; v++) {
            codes[v] = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w + v * at->stride), 4), low);
            if (U4 == BOOK)
                codes[v] = _mm512_shuffle_epi8(book, codes[v]);
        }
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
            float *sums = at->sums + (m * NV + v) * QS_LANES;
            _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[m][v]), scale),
                                                  _mm512_set1_ps(at->x_scales[m * at->parts]),
                                                  _mm512_load_ps(sums)));
        }
    }
}

/* MR rows by NV tiles. The float sums are in memory, because the accumulators of a group need the registers. */
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
        .codebook = op->codebook,
        .sums = sums,
        .x_stride = op->k,
        .parts = parts,
        .stride = stride,
        .scale_stride = groups * QS_LANES,
        .ahead = ahead,
        .scales_ahead = ahead ? TILES * groups * QS_LANES * (op->scale_dtype == QS_F16 ? 2 : 4) : 0,
    };
    fetch_block(op, row, tile, MR, NV);
    UNROLL for (int i = 0; i < MR * NV; i++)
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
    store_block(op, sums, row, tile, MR, NV);
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
                INT_CASE(5, NV, U4)                                                                               \
                INT_CASE(6, NV, U4)                                                                               \
            }                                                                                                     \
    }

INT_KERNEL(u4_wide, 4, 1)
INT_KERNEL(u4_narrow, 1, 1)
INT_KERNEL(book_wide, 4, BOOK)
INT_KERNEL(book_narrow, 1, BOOK)
INT_KERNEL(u8_wide, 4, 0)
INT_KERNEL(u8_narrow, 1, 0)

static void linear_int(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                       uint8_t *unpacked)
{
    int u4 = op->dtype == QS_U4, wide = tiles == TILES;
    int64_t stride = (int64_t)op->k * (u4 ? 8 : 16);
    const uint8_t *weight = (const uint8_t *)op->weight + tile * stride;
    /* Narrow tiles are too short for the processor to detect a stream. So the next piece, which mostly goes to this
     * thread too, is fetched meanwhile (measured on one row: 24 GB/s instead of 15; on tiles of 32 KB the processor
     * does so by itself). */
    int64_t ahead = stride * tiles <= NEAR ? stride * tiles : 0;
    if (op->codebook && wide)
        book_wide(op, acts, row, end, tile, weight, stride, ahead);
    else if (wide)
        (u4 ? u4_wide : u8_wide)(op, acts, row, end, tile, weight, stride, ahead);
    for (int32_t t = 0; t < tiles && !wide; t++)
        (op->codebook ? book_narrow : u4 ? u4_narrow : u8_narrow)(op, acts, row, end, tile + t, weight + t * stride,
                                                                  stride, ahead);
    end_streams();
}
