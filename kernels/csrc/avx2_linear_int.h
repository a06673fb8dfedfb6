/* The product of integers with AVX2 for many rows, behind linear_int.h: the nibbles of a tile are unpacked once, and
 * blocks of at most six rows read bytes. A byte that is not small is two nibbles: see dot_u8. */

#define MANY 5            /* rows from which on unpacking nibbles pays */
#define MANY_BYTES 12     /* the same of bytes that are not small */
#define BLOCK_ROWS 6      /* 12 sums, two vectors of codes and two of products: 16 registers */
#define STRIP_ROWS 96     /* whose sums are kept */
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

/* The same of a tile of bytes, to [HALVES][inputs / 4][low, high][8][4]: nibbles of half the outputs. */
INLINE void unpack_bytes(const qs_linear *op, int32_t tile, int32_t first, int32_t inputs, int64_t ahead,
                         uint8_t *unpacked)
{
    const __m256i low = _mm256_set1_epi8(15);
    const uint8_t *w = (const uint8_t *)op->weight + ((int64_t)tile * op->k + first) * QS_LANES;
    for (int32_t j = 0; j < inputs; j += 4, w += 64, unpacked += 64) {
        _mm_prefetch((const char *)w + ahead, _MM_HINT_T1);
        UNROLL for (int v = 0; v < HALVES; v++) {
            __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(w + 32 * v));
            __m256i *to = (__m256i *)(void *)(unpacked + (int64_t)v * inputs * QS_LANES);
            _mm256_storeu_si256(to, _mm256_and_si256(bytes, low));
            _mm256_storeu_si256(to + 1, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
        }
    }
}

/* Whether bytes are two nibbles each. */
INLINE int is_split(const qs_linear *op)
{
    return op->dtype == QS_U8 && op->bits > QS_SMALL_BITS;
}

static void unpack(const qs_linear *op, int32_t tile, int32_t first, int32_t inputs, int64_t ahead, uint8_t *unpacked)
{
    if (is_split(op))
        unpack_bytes(op, tile, first, inputs, ahead, unpacked);
    else if (op->codebook)
        unpack_codes(op, tile, first, inputs, ahead, unpacked, BOOK);
    else
        unpack_codes(op, tile, first, inputs, ahead, unpacked, 1);
}

/* What the assembly may read behind an address. It clobbers no memory, so what is in registers stays there. */
typedef struct {
    uint8_t bytes[1 << 24]; /* more than any group */
} __attribute__((may_alias)) read_bytes;

#define CLEAR(i) "vpxor %" #i ", %" #i ", %" #i "\n\t"
/* Adds the products of the row at `address` to the sums i and j. */
#define TIMES(address, i, j) \
    "vpbroadcastd " address ", %[second]\n\t" \
    "vpmaddubsw %[second], %[codes], %[first]\n\t" \
    "vpmaddubsw %[second], %[others], %[second]\n\t" \
    "vpaddw %[first], %" #i ", %" #i "\n\t" \
    "vpaddw %[second], %" #j ", %" #j "\n\t"
#define TIMES_3(from) \
    TIMES(from "(%[x])", 0, 1) TIMES(from "(%[x],%[stride])", 2, 3) TIMES(from "(%[x],%[stride],2)", 4, 5)
#define TIMES_4(from) TIMES_3(from) TIMES(from "(%[y])", 6, 7)
#define TIMES_5(from) TIMES_4(from) TIMES(from "(%[y],%[stride])", 8, 9)
#define TIMES_6(from) TIMES_5(from) TIMES(from "(%[y],%[stride],2)", 10, 11)
#define PAIRS(rows) \
    case rows: \
        __asm__(CLEAR(0) CLEAR(1) CLEAR(2) CLEAR(3) CLEAR(4) CLEAR(5) CLEAR(6) CLEAR(7) CLEAR(8) CLEAR(9) CLEAR(10) \
                CLEAR(11) \
                "1:\n\t" \
                "vmovdqu (%[w]), %[codes]\n\t" \
                "vmovdqu 32(%[w]), %[others]\n\t" TIMES_##rows("") \
                "vmovdqu 64(%[w]), %[codes]\n\t" \
                "vmovdqu 96(%[w]), %[others]\n\t" TIMES_##rows("4") \
                "add $8, %[x]\n\t" \
                "add $8, %[y]\n\t" \
                "sub $-128, %[w]\n\t" \
                "cmp %[end], %[w]\n\t" \
                "jne 1b" \
                : "=&x"(sums[0]), "=&x"(sums[1]), "=&x"(sums[2]), "=&x"(sums[3]), "=&x"(sums[4]), "=&x"(sums[5]), \
                  "=&x"(sums[6]), "=&x"(sums[7]), "=&x"(sums[8]), "=&x"(sums[9]), "=&x"(sums[10]), "=&x"(sums[11]), \
                  [codes] "=&x"(codes), [others] "=&x"(others), [first] "=&x"(first), [second] "=&x"(second), \
                  [x] "+r"(x), [y] "+r"(y), [w] "+r"(w) \
                : [stride] "r"(stride), [end] "r"(end), "m"(*(const read_bytes *)x), "m"(*(const read_bytes *)w) \
                : "cc"); \
        break;

/* 16-bit sums of `span` inputs, a multiple of 8, of each row by two vectors of codes. All in assembly: the compiler would
 * spill sums. */
INLINE void add_span(const int8_t *x, int64_t stride, const uint8_t *w, int32_t span, __m256i sums[2 * BLOCK_ROWS],
                     const int rows)
{
    const int8_t *y = x + 3 * stride;
    const uint8_t *end = w + (int64_t)span * 16;
    __m256i codes, others, first, second;
    switch (rows) {
        PAIRS(3) PAIRS(4) PAIRS(5) PAIRS(6)
    }
}

/* Whether no row's products with codes of at most `greatest` leave 16 bits, however they are added: sums may wrap on the
 * way, since they end within. */
INLINE int stays_short(const int32_t *reach, int32_t greatest, const int rows)
{
    __m256i reaches = _mm256_loadu_si256((const __m256i *)(const void *)reach);
    __m256i above = _mm256_cmpgt_epi32(reaches, _mm256_set1_epi32(INT16_MAX / greatest));
    return !(_mm256_movemask_ps(_mm256_castsi256_ps(above)) & ((1 << rows) - 1));
}

/* Dot i of a span: its sums, or those of low and of high nibbles where they are `split`. */
INLINE __m256i span_dot(const __m256i sums[2 * BLOCK_ROWS], int i, const int split)
{
    const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
    if (!split)
        return _mm256_madd_epi16(sums[i], one);
    return _mm256_add_epi32(_mm256_madd_epi16(sums[2 * i], one), _mm256_madd_epi16(sums[2 * i + 1], sixteen));
}

/* Adds an activation group of each row by a tile to `sums`, whose rows lie `apart`: by both halves of the tile, or by
 * half `v` where nibbles are `split`. Sums of 16 bits hold `most` inputs. */
INLINE void add_group(const int_walk *at, int32_t width, const int32_t *starts, int32_t most, float *sums, int64_t apart,
                      int v, const int rows, const int split)
{
    const int count = split ? 1 : HALVES; /* dots of a row */
    __m256i dots[2 * BLOCK_ROWS], shorts[2 * BLOCK_ROWS];
    vf products[BLOCK_ROWS];
    UNROLL for (int i = 0; i < count * rows; i++)
        dots[i] = _mm256_set1_epi32(starts[i / count]);
    for (int32_t j = 0; j < width; j += most) {
        int32_t span = width - j < most ? width - j : most;
        add_span(at->x + j, at->x_stride, at->w + (int64_t)j * QS_LANES, span, shorts, rows);
        UNROLL for (int i = 0; i < count * rows; i++)
            dots[i] = _mm256_add_epi32(dots[i], span_dot(shorts, i, split));
    }
    UNROLL for (int part = 0; part < count; part++) {
        UNROLL for (int m = 0; m < rows; m++)
            products[m] = _mm256_cvtepi32_ps(dots[count * m + part]);
        add_scaled(at, products, sums, apart, split ? v : part, rows);
    }
}

/* The same where 16 bits hold all of the group, and without zero points. Row by row, so that nothing waits in memory. */
INLINE void add_short_group(const int_walk *at, int32_t width, const int32_t *starts, float *sums, int64_t apart, int v,
                            const int rows, const int split)
{
    const int count = split ? 1 : HALVES;
    __m256i shorts[2 * BLOCK_ROWS];
    vf scales[HALVES];
    add_span(at->x, at->x_stride, at->w, width, shorts, rows);
    UNROLL for (int part = 0; part < count; part++)
        scales[part] = load_scales(at->scales, split ? v : part, at->scale_dtype);
    UNROLL for (int m = 0; m < rows; m++) {
        const __m256i start = _mm256_set1_epi32(starts[m]);
        const vf x_scale = all(at->x_scales[m]);
        UNROLL for (int part = 0; part < count; part++) {
            float *sum = sums + m * apart + LANES * (split ? v : part);
            vf product = _mm256_cvtepi32_ps(_mm256_add_epi32(start, span_dot(shorts, count * m + part, split)));
            store(sum, fused(product * scales[part], x_scale, load(sum)));
        }
    }
}

/* Adds the activation groups of `inputs` inputs from `first` on, in whichever way they fit. `reach` is that of `at`. */
INLINE void add_groups(const qs_linear *op, int_walk at, const int32_t *reach, int32_t first, int32_t inputs,
                       float *sums, int64_t apart, int v, const int rows, const int split)
{
    const int32_t width = op->act_group, sharing = op->group / width, small = !split && op->dtype == QS_U8;
    const int32_t greatest = small ? 63 : op->codebook ? 31 : 15;
    const int32_t most = small ? SMALL_SPAN : op->codebook ? BOOK_SPAN : SPAN;
    int32_t left = sharing - (first / width) % sharing; /* groups with this scale */
    for (int32_t j = 0; j < inputs; j += width, reach += at.x_rows) {
        const int short_enough = stays_short(reach, greatest, rows);
        int32_t starts[8] __attribute__((aligned(32)));
        __m256i x_sums = _mm256_loadu_si256((const __m256i *)(const void *)at.x_sums);
        _mm256_store_si256((__m256i *)(void *)starts, _mm256_mullo_epi32(x_sums, _mm256_set1_epi32(-op->zero)));
        if (short_enough && !at.zeros)
            add_short_group(&at, width, starts, sums, apart, v, rows, split);
        else
            add_group(&at, width, starts, short_enough ? width : most, sums, apart, v, rows, split);
        left = left > 1 ? left - 1 : sharing;
        advance(op, &at, (int64_t)width * QS_LANES, left == sharing);
    }
}

/* Adds `inputs` inputs of a tile from `first` on, which were unpacked, to `sums`, whose rows lie `apart`. */
INLINE void add_chunk(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t tile, int32_t first,
                      int32_t inputs, const uint8_t *unpacked, float *sums, int64_t apart, const int rows)
{
    int_walk at = walk(op, acts, row, tile, first, unpacked, 0);
    const int32_t *reach = acts->reach + (at.x_sums - acts->sums);
    if (!is_split(op)) {
        add_groups(op, at, reach, first, inputs, sums, apart, 0, rows, 0);
        return;
    }
    for (int v = 0; v < HALVES; v++, at.w += (int64_t)inputs * QS_LANES)
        add_groups(op, at, reach, first, inputs, sums, apart, v, rows, 1);
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
    const int32_t group = op->act_group, most = CHUNK / tiles / (1 + is_split(op));
    const int32_t chunk = group < most ? most / group * group : group;
    memset(sums, 0, sizeof(float) * (size_t)((end - row) * tiles * QS_LANES));
    for (int32_t first = 0, inputs; first < op->k; first += inputs) {
        inputs = op->k - first < chunk ? op->k - first : chunk;
        const int small = op->dtype == QS_U8 && !is_split(op);
        const int64_t stride = (int64_t)(small ? op->k : inputs) * QS_LANES * (1 + is_split(op));
        const uint8_t *bytes = small ? (const uint8_t *)op->weight + tile * stride + first * QS_LANES : unpacked;
        for (int32_t t = 0; t < tiles && !small; t++)
            unpack(op, tile + t, first, inputs, ahead, unpacked + t * stride);
        for (int32_t at = row, rows; at < end; at += rows) { /* in blocks of nearly the same size */
            int32_t blocks = (end - at + BLOCK_ROWS - 1) / BLOCK_ROWS;
            rows = (end - at + blocks - 1) / blocks;
            switch (rows) {
                BLOCK_CASE(3) BLOCK_CASE(4) BLOCK_CASE(5) BLOCK_CASE(6)
            }
        }
    }
}

static void linear_many(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                        uint8_t *unpacked)
{
    /* The nibbles of two halves of a tile have to stay in the cache. */
    const int fits = !is_split(op) || op->act_group <= CHUNK / 2;
    if (end - row < (is_split(op) ? MANY_BYTES : MANY) || !fits || (op->codebook && op->codebook_bytes == 2)) {
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
