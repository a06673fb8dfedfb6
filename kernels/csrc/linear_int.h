/* The integer product tile by tile, for short vectors. Behind store_tiles.h; an ISA defines ROWS, the most rows of a
 * block, and then int_group, whose `u4` is BOOK or BOOK16 where codes stand for numbers of a codebook, and SMALL for small
 * bytes where the ISA has a HAS_SMALL. */

/* Where a product of one tile reads and adds: advanced by one activation group at a time. */
typedef struct {
    const int8_t *x;       /* [rows][x_stride] */
    const int32_t *x_sums; /* [rows] */
    const float *x_scales; /* [rows] */
    const uint8_t *w;
    const uint8_t *scales, *zeros; /* zeros: NULL for none */
    int32_t scale_dtype;
    const uint8_t *codebook;
    int64_t x_stride, x_rows, groups; /* x_rows: from a group to the next */
    int64_t ahead;         /* bytes from the weights being read to those prefetched meanwhile; 0: none */
} int_walk;

/* Adds the scaled products of codes, [rows] of part of a tile, to `sums`, whose rows lie `apart`. A product is below 2^24
 * where a group has the usual size: then it is exact, and what a zero point leaves of it is rounded once. */
INLINE void add_scaled(const int_walk *at, vf *products, float *sums, int64_t apart, int part, const int rows)
{
    vf scale = load_scales(at->scales, part, at->scale_dtype);
    if (at->zeros) {
        vf zero = load_scales(at->zeros, part, at->scale_dtype);
        UNROLL for (int m = 0; m < rows; m++)
            products[m] = fused(zero, all(-(float)at->x_sums[m]), products[m]);
    }
    UNROLL for (int m = 0; m < rows; m++) {
        float *sum = sums + m * apart + LANES * part;
        store(sum, fused(products[m] * scale, all(at->x_scales[m]), load(sum)));
    }
}

/* At input `first` of a tile, whose codes begin at `w`. */
INLINE int_walk walk(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t tile, int32_t first,
                     const uint8_t *w, int64_t ahead)
{
    int64_t at = first / op->act_group * acts->rows + row;
    int64_t scales_at = ((int64_t)tile * (op->k / op->group) + first / op->group) * QS_LANES * qs_scale_bytes(op);
    return (int_walk){
        .x = acts->codes + at * op->act_group,
        .x_sums = acts->sums + at,
        .x_scales = acts->scales + at,
        .w = w,
        .scales = (const uint8_t *)op->scales + scales_at,
        .zeros = op->zeros ? (const uint8_t *)op->zeros + scales_at : NULL,
        .scale_dtype = op->scale_dtype,
        .codebook = op->codebook,
        .x_stride = op->act_group,
        .x_rows = acts->rows,
        .groups = op->k / op->act_group,
        .ahead = ahead,
    };
}

/* On to the next activation group, whose codes begin `bytes` further and which may have a `new_scale`. */
INLINE void advance(const qs_linear *op, int_walk *at, int64_t bytes, int new_scale)
{
    at->x += at->x_rows * op->act_group;
    at->w += bytes;
    at->x_sums += at->x_rows;
    at->x_scales += at->x_rows;
    if (new_scale) {
        int64_t scale = QS_LANES * qs_scale_bytes(op);
        at->scales += scale;
        at->zeros = at->zeros ? at->zeros + scale : NULL;
    }
}

/* Adds one activation group of `rows` rows by one tile to `sums`. The dot starts at -zero * sum(codes), so that a
 * constant zero point costs nothing. */
INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, float sums[ROWS][QS_LANES], const int rows,
                      const int u4);

INLINE void int_block(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t tile, int64_t ahead, const int rows,
                      const int u4)
{
    const int32_t bytes = u4 && u4 != SMALL ? 8 : 16; /* for each input */
    float sums[ROWS][QS_LANES] __attribute__((aligned(64)));
    int_walk at = walk(op, acts, row, tile, 0, (const uint8_t *)op->weight + (int64_t)tile * op->k * bytes, ahead);
    memset(sums, 0, sizeof sums);
    for (int32_t g = 1; g <= at.groups; g++) {
        int_group(&at, op->zero, op->act_group, sums, rows, u4);
        advance(op, &at, (int64_t)op->act_group * bytes, g % (op->group / op->act_group) == 0);
    }
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < QS_LANES && op->row_scales; i += LANES)
            store(sums[m] + i, load(sums[m] + i) * load(op->row_scales + tile * QS_LANES + i));
    store_block(op, sums[0], row, tile, rows, 1);
}

INLINE void int_rows(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int64_t ahead,
                     const int u4)
{
    for (; row + ROWS <= end; row += ROWS, ahead = 0) /* fetched once */
        int_block(op, acts, row, tile, ahead, ROWS, u4);
    for (; row + 2 <= end; row += 2, ahead = 0)
        int_block(op, acts, row, tile, ahead, 2, u4);
    for (; row < end; row++, ahead = 0)
        int_block(op, acts, row, tile, ahead, 1, u4);
}

/* Bytes from the weights being read to the next piece, which mostly goes to this thread too; 0 where that is far. */
INLINE int64_t next_piece(const qs_linear *op, int32_t tiles)
{
    int64_t bytes = (int64_t)op->k * (op->dtype == QS_U4 ? 8 : 16) * tiles;
    return bytes <= NEAR ? bytes : 0;
}

static void linear_int(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                       uint8_t *unpacked)
{
    (void)unpacked;
    const int64_t ahead = next_piece(op, tiles);
    for (int32_t t = tile; t < tile + tiles; t++) {
        if (op->codebook && op->codebook_bytes == 2)
            int_rows(op, acts, row, end, t, ahead, BOOK16);
        else if (op->codebook)
            int_rows(op, acts, row, end, t, ahead, BOOK);
        else if (op->dtype == QS_U4)
            int_rows(op, acts, row, end, t, ahead, 1);
#ifdef HAS_SMALL
        else if (op->bits <= QS_SMALL_BITS)
            int_rows(op, acts, row, end, t, ahead, SMALL);
#endif
        else
            int_rows(op, acts, row, end, t, ahead, 0);
    }
    end_streams();
}
