/* The product of integers with AVX-512 and VNNI, behind store_tiles.h. */

#define TILES 4      /* weight tiles of 16 outputs in one block */
#define INT_ROWS 6   /* rows of an integer block: 24 accumulators and 4 unpacked tiles */
#define FEW_ROWS 2   /* whose two dots with numbers of two bytes fit beside them */

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
    const int32_t *x_sums;  /* [rows] */
    const float *x_scales;  /* [rows] */
    const uint8_t *w;       /* [tiles][stride] */
    const uint8_t *scales;  /* [tiles][scale_stride] */
    const uint8_t *zeros;   /* like scales, or NULL for none */
    const uint8_t *codebook;
    float *sums;            /* [rows][tiles][16] */
    int64_t x_stride, stride, scale_stride; /* scale_stride: in bytes */
    int32_t scale_dtype;
    int64_t ahead;          /* bytes from the weights being read to those prefetched meanwhile; 0: none */
    int64_t scales_ahead;   /* the same of the scales */
} int_walk;

/* Adds the products of four inputs, x on, to each of `count` dots: of bytes, or of a half of each byte. Nibbles may stand
 * for the numbers of a book, which is another one for each dot. */
INLINE void add_four(const int_walk *at, const int8_t *x, const uint8_t *w, const __m512i *books,
                     __m512i dots[][INT_ROWS][TILES], const int half, const int count, const int MR, const int NV,
                     const int U4)
{
    const __m512i low = _mm512_set1_epi8(15);
    __m512i codes[2][TILES];
    UNROLL for (int v = 0; v < NV; v++) {
        __m512i bytes = _mm512_loadu_si512(w + v * at->stride);
        if (U4)
            bytes = _mm512_and_si512(half ? _mm512_srli_epi16(bytes, 4) : bytes, low);
        UNROLL for (int i = 0; i < count; i++)
            codes[i][v] = U4 >= BOOK ? _mm512_shuffle_epi8(books[i], bytes) : bytes;
    }
    UNROLL for (int m = 0; m < MR; m++) {
        __m512i inputs = four(x + m * at->x_stride);
        UNROLL for (int i = 0; i < count; i++)
            UNROLL for (int v = 0; v < NV; v++)
                dots[i][m][v] = dot4(dots[i][m][v], codes[i][v], inputs);
    }
}

/* The same of an activation group. */
INLINE void add_dots(const int_walk *at, int64_t ahead, int32_t width, const __m512i *books,
                     __m512i dots[][INT_ROWS][TILES], const int count, const int MR, const int NV, const int U4)
{
    const uint8_t *w = at->w;
    for (int32_t j = 0; j < width; j += U4 ? 8 : 4, w += 64) {
        UNROLL for (int v = 0; v < NV; v++)
            _mm_prefetch(w + v * at->stride + ahead, _MM_HINT_T1);
        add_four(at, at->x + j, w, books, dots, 0, count, MR, NV, U4);
        if (U4)
            add_four(at, at->x + j + 4, w, books, dots, 1, count, MR, NV, U4);
    }
}

INLINE __m512i broadcast_book(const uint8_t *codebook)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codebook));
}

/* One activation group of MR rows by NV tiles. The integer dot starts at -zero * sum(codes), so that a constant zero
 * point costs nothing inside; every path scales it by the same two products, so all paths give the same bits. */
INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, const int MR, const int NV, const int U4)
{
    __m512i dots[2][INT_ROWS][TILES], books[2];
    const int both = U4 == BOOK16 && MR <= FEW_ROWS;
    UNROLL for (int i = 0; i < 2 && U4 >= BOOK; i++)
        books[i] = broadcast_book(at->codebook + (U4 == BOOK16 ? 16 * (1 - i) : 0)); /* high bytes first */
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            dots[0][m][v] = _mm512_setzero_si512();
    if (U4 == BOOK16 && !both)
        add_dots(at, at->ahead, width, books, dots, 1, MR, NV, U4);
    UNROLL for (int m = 0; m < MR; m++) {
        __m512i start = _mm512_set1_epi32(-at->x_sums[m] * zero);
        UNROLL for (int v = 0; v < NV; v++)
            dots[1][m][v] = U4 != BOOK16 || both ? start : _mm512_add_epi32(_mm512_slli_epi32(dots[0][m][v], 8), start);
    }
    if (both)
        add_dots(at, at->ahead, width, books, dots, 2, MR, NV, U4);
    else
        add_dots(at, U4 == BOOK16 ? 0 : at->ahead, width, books + 1, dots + 1, 1, MR, NV, U4);
    UNROLL for (int m = 0; m < MR && both; m++)
        UNROLL for (int v = 0; v < NV; v++)
            dots[1][m][v] = _mm512_add_epi32(_mm512_slli_epi32(dots[0][m][v], 8), dots[1][m][v]);
    UNROLL for (int v = 0; v < NV; v++) {
        const uint8_t *scales = at->scales + v * at->scale_stride;
        __m512 scale = load_scales(scales, 0, at->scale_dtype), product[INT_ROWS];
        _mm_prefetch(scales + at->scales_ahead, _MM_HINT_T1);
        UNROLL for (int m = 0; m < MR; m++)
            product[m] = _mm512_cvtepi32_ps(dots[1][m][v]);
        if (at->zeros) {
            const uint8_t *zeros = at->zeros + v * at->scale_stride;
            __m512 zero_point = load_scales(zeros, 0, at->scale_dtype);
            _mm_prefetch(zeros + at->scales_ahead, _MM_HINT_T1);
            UNROLL for (int m = 0; m < MR; m++)
                product[m] = _mm512_fnmadd_ps(zero_point, _mm512_set1_ps((float)at->x_sums[m]), product[m]);
        }
        UNROLL for (int m = 0; m < MR; m++) {
            float *sums = at->sums + (m * NV + v) * QS_LANES;
            _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_mul_ps(product[m], scale),
                                                  _mm512_set1_ps(at->x_scales[m]),
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
    int64_t scale = QS_LANES * qs_scale_bytes(op); /* of a tile */
    int_walk at = {
        .x = acts->codes + (int64_t)row * op->act_group,
        .x_sums = acts->sums + row,
        .x_scales = acts->scales + row,
        .w = weight,
        .scales = (const uint8_t *)op->scales + tile * groups * scale,
        .zeros = op->zeros ? (const uint8_t *)op->zeros + tile * groups * scale : NULL,
        .scale_dtype = op->scale_dtype,
        .codebook = op->codebook,
        .sums = sums,
        .x_stride = op->act_group,
        .stride = stride,
        .scale_stride = groups * scale,
        .ahead = ahead,
        .scales_ahead = ahead ? TILES * groups * scale : 0,
    };
    fetch_block(op, row, tile, MR, NV);
    UNROLL for (int i = 0; i < MR * NV; i++)
        _mm512_store_ps(sums + i * QS_LANES, _mm512_setzero_ps());
    for (int64_t p = 0; p < parts; p++) {
        int_group(&at, op->zero, op->act_group, MR, NV, U4);
        at.x += acts->rows * op->act_group;
        at.w += (int64_t)op->act_group * (U4 ? 8 : 16);
        at.x_sums += acts->rows;
        at.x_scales += acts->rows;
        if ((p + 1) % per_group == 0) {
            at.scales += scale;
            at.zeros = at.zeros ? at.zeros + scale : NULL;
        }
    }
    for (int i = 0; i < MR * NV && op->row_scales; i++)
        store(sums + i * QS_LANES, load(sums + i * QS_LANES) * load(op->row_scales + (tile + i % NV) * QS_LANES));
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
INT_KERNEL(words_wide, 4, BOOK16)
INT_KERNEL(words_narrow, 1, BOOK16)
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
    const int book = !op->codebook ? 0 : op->codebook_bytes == 2 ? BOOK16 : BOOK;
    if (wide)
        (book == BOOK16 ? words_wide : book ? book_wide : u4 ? u4_wide : u8_wide)(op, acts, row, end, tile, weight,
                                                                                    stride, ahead);
    for (int32_t t = 0; t < tiles && !wide; t++)
        (book == BOOK16 ? words_narrow : book ? book_narrow : u4 ? u4_narrow : u8_narrow)(
            op, acts, row, end, tile + t, weight + t * stride, stride, ahead);
    end_streams();
}
