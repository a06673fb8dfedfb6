/* The product of nibbles and of small bytes with AVX2 for many rows, behind linear_int.h: the nibbles of a tile are
 * unpacked once, and blocks of at most six rows read bytes. */

#define MANY 12           /* rows from which on unpacking pays */
#define BLOCK_ROWS 6      /* 12 sums, two vectors of codes and two of products: 16 registers */
#define STRIP_ROWS 48     /* whose sums are kept */
#define CHUNK 768         /* inputs of a tile, at most: their codes stay in the first-level cache */

/* Unpacks `inputs` inputs of a tile from `first` on to [inputs / 4][16][4]. Codes `ahead` bytes further are prefetched. */
INLINE void unpack_codes(const qs_linear *op, int32_t tile, int32_t first, int32_t inputs, int64_t ahead,
                         uint8_t *unpacked, const int u4)
{
    const __m256i low = _mm256_set1_epi8(15), book = u4 == BOOK ? both(op->codebook) : low;
    const uint8_t *w = (const uint8_t *)op->weight + ((int64_t)tile * op->k + first) * 8;
    for (int32_t j = 0; j < inputs; j += 8, w += 64, unpacked += 128) {
        _mm_prefetch((const char *)w + ahead, _MM_HINT_T1);
        UNROLL for (int v = 0; v < HALVES; v++) {
            __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(w + 32 * v));
            UNROLL for (int i = 0; i < 2; i++) {
                __m256i codes = _mm256_and_si256(i ? _mm256_srli_epi16(bytes, 4) : bytes, low);
                codes = u4 == BOOK ? _mm256_shuffle_epi8(book, codes) : codes;
                _mm256_storeu_si256((__m256i *)(void *)(unpacked + 32 * v + 64 * i), codes);
            }
        }
    }
}

static void unpack(const qs_linear *op, int32_t tile, int32_t first, int32_t inputs, int64_t ahead, uint8_t *unpacked)
{
    if (op->codebook)
        unpack_codes(op, tile, first, inputs, ahead, unpacked, BOOK);
    else
        unpack_codes(op, tile, first, inputs, ahead, unpacked, 1);
}

#define CLEAR(i) "vpxor %" #i ", %" #i ", %" #i "\n\t"
/* Adds the products of the row at `address` to the sums i and j. */
#define TIMES(address, i, j) \
    "vpbroadcastd " address ", %[second]\n\t" \
    "vpmaddubsw %[second], %[codes], %[first]\n\t" \
    "vpmaddubsw %[second], %[others], %[second]\n\t" \
    "vpaddw %[first], %" #i ", %" #i "\n\t" \
    "vpaddw %[second], %" #j ", %" #j "\n\t"
#define TIMES_4 \
    TIMES("(%[x])", 0, 1) TIMES("(%[x],%[stride])", 2, 3) TIMES("(%[x],%[stride],2)", 4, 5) TIMES("(%[y])", 6, 7)
#define TIMES_5 TIMES_4 TIMES("(%[y],%[stride])", 8, 9)
#define TIMES_6 TIMES_5 TIMES("(%[y],%[stride],2)", 10, 11)
#define PAIRS(rows) \
    case rows: \
        __asm__(CLEAR(0) CLEAR(1) CLEAR(2) CLEAR(3) CLEAR(4) CLEAR(5) CLEAR(6) CLEAR(7) CLEAR(8) CLEAR(9) CLEAR(10) \
                CLEAR(11) \
                "1:\n\t" \
                "vmovdqu (%[w]), %[codes]\n\t" \
                "vmovdqu 32(%[w]), %[others]\n\t" TIMES_##rows \
                "add $4, %[x]\n\t" \
                "add $4, %[y]\n\t" \
                "add $64, %[w]\n\t" \
                "cmp %[end], %[w]\n\t" \
                "jne 1b" \
                : "=&x"(sums[0]), "=&x"(sums[1]), "=&x"(sums[2]), "=&x"(sums[3]), "=&x"(sums[4]), "=&x"(sums[5]), \
                  "=&x"(sums[6]), "=&x"(sums[7]), "=&x"(sums[8]), "=&x"(sums[9]), "=&x"(sums[10]), "=&x"(sums[11]), \
                  [codes] "=&x"(codes), [others] "=&x"(others), [first] "=&x"(first), [second] "=&x"(second), \
                  [x] "+r"(x), [y] "+r"(y), [w] "+r"(w) \
                : [stride] "r"(stride), [end] "r"(end) \
                : "memory", "cc"); \
        break;

/* 16-bit sums of `span` inputs of each row by two vectors of codes. All in assembly: the compiler would spill sums. */
INLINE void add_span(const int8_t *x, int64_t stride, const uint8_t *w, int32_t span, __m256i sums[2 * BLOCK_ROWS],
                     const int rows)
{
    const int8_t *y = x + 3 * stride;
    const uint8_t *end = w + (int64_t)span * 16;
    __m256i codes, others, first, second;
    switch (rows) {
        PAIRS(4) PAIRS(5) PAIRS(6)
    }
}

/* Adds an activation group of each row by a tile to `dots`, two vectors for each row. Sums of 16 bits hold `most`
 * inputs. */
INLINE void add_dots(const int_walk *at, int32_t width, int32_t most, __m256i dots[2 * BLOCK_ROWS], const int rows)
{
    const __m256i one = _mm256_set1_epi16(1);
    for (int32_t j = 0; j < width; j += most) {
        __m256i sums[2 * BLOCK_ROWS];
        add_span(at->x + j, at->x_stride, at->w + (int64_t)j * QS_LANES, width - j < most ? width - j : most, sums, rows);
        UNROLL for (int i = 0; i < 2 * rows; i++)
            dots[i] = _mm256_add_epi32(dots[i], _mm256_madd_epi16(sums[i], one));
    }
}

/* Adds `inputs` inputs of a tile from `first` on, which were unpacked, to `sums`, whose rows lie `apart`. */
INLINE void add_chunk(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t tile, int32_t first,
                      int32_t inputs, const uint8_t *unpacked, float *sums, int64_t apart, const int rows)
{
    const int32_t most = op->dtype == QS_U8 ? SMALL_SPAN : op->codebook ? BOOK_SPAN : SPAN, end = (first + inputs) / op->act_group;
    int_walk at = walk(op, acts, row, tile, first, unpacked, 0);
    for (int32_t g = first / op->act_group + 1; g <= end; g++) {
        __m256i dots[2 * BLOCK_ROWS];
        vf products[BLOCK_ROWS];
        UNROLL for (int m = 0; m < rows; m++)
            dots[2 * m] = dots[2 * m + 1] = _mm256_set1_epi32(-at.x_sums[m] * op->zero);
        add_dots(&at, op->act_group, most, dots, rows);
        UNROLL for (int v = 0; v < HALVES; v++) {
            UNROLL for (int m = 0; m < rows; m++)
                products[m] = _mm256_cvtepi32_ps(dots[2 * m + v]);
            add_scaled(&at, products, sums, apart, v, rows);
        }
        advance(op, &at, g, (int64_t)op->act_group * QS_LANES);
    }
}

/* The same of `tiles` tiles, whose bytes lie `stride` apart. Behind the last chunk the sums are stored. */
INLINE void add_block(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t tile, int32_t tiles, int32_t first,
                      int32_t inputs, const uint8_t *unpacked, int64_t stride, float *sums, const int rows)
{
    const int32_t apart = tiles * QS_LANES;
    for (int32_t t = 0; t < tiles; t++, unpacked += stride)
        add_chunk(op, acts, row, tile + t, first, inputs, unpacked, sums + t * QS_LANES, apart, rows);
    if (first + inputs < op->k)
        return;
    for (int32_t i = 0; i < rows * apart && op->row_scales; i += LANES)
        store(sums + i, load(sums + i) * load(op->row_scales + tile * QS_LANES + i % apart));
    store_block(op, sums, row, tile, rows, tiles);
}

#define BLOCK_CASE(rows) \
    case rows: \
        add_block(op, acts, at, tile, tiles, first, inputs, bytes, stride, sums + (at - row) * tiles * QS_LANES, rows); \
        break;

/* A strip of rows [row, end) by `tiles` tiles, one or a gate and its factor. */
INLINE void strip(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                  int64_t ahead, uint8_t *unpacked)
{
    float sums[STRIP_ROWS * 2 * QS_LANES] __attribute__((aligned(64)));
    const int32_t group = op->act_group, chunk = group < CHUNK / tiles ? CHUNK / tiles / group * group : group;
    memset(sums, 0, sizeof(float) * (size_t)((end - row) * tiles * QS_LANES));
    for (int32_t first = 0, inputs; first < op->k; first += inputs) {
        inputs = op->k - first < chunk ? op->k - first : chunk;
        const int small = op->dtype == QS_U8;
        const int64_t stride = (int64_t)(small ? op->k : inputs) * QS_LANES;
        const uint8_t *bytes = small ? (const uint8_t *)op->weight + tile * stride + first * QS_LANES : unpacked;
        for (int32_t t = 0; t < tiles && !small; t++)
            unpack(op, tile + t, first, inputs, ahead, unpacked + t * inputs * QS_LANES);
        for (int32_t at = row, rows; at < end; at += rows) { /* in blocks of nearly the same size */
            int32_t blocks = (end - at + BLOCK_ROWS - 1) / BLOCK_ROWS;
            rows = (end - at + blocks - 1) / blocks;
            switch (rows) {
                BLOCK_CASE(4) BLOCK_CASE(5) BLOCK_CASE(6)
            }
        }
    }
}

static void linear_many(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                        uint8_t *unpacked)
{
    /* Larger bytes are two nibbles each: unpacking them costs more than it brings. */
    const int fits = op->dtype == QS_U4 || op->bits <= QS_SMALL_BITS;
    if (end - row < MANY || !fits || (op->codebook && op->codebook_bytes == 2)) {
        linear_int(op, acts, row, end, tile, tiles, unpacked);
        return;
    }
    const int32_t step = 1 + op->gated;
    int64_t ahead = next_piece(op, tiles);
    for (int32_t rows; row < end; row += rows, ahead = 0) { /* fetched once */
        int32_t strips = (end - row + STRIP_ROWS - 1) / STRIP_ROWS;
        rows = (end - row + strips - 1) / strips;
        for (int32_t t = tile; t < tile + tiles; t += step)
            strip(op, acts, row, row + rows, t, step, ahead, unpacked);
    }
    end_streams();
}
