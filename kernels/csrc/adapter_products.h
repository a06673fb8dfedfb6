/* The products of adapters (LoRA) over vectors, behind rows.h. An ISA defines CHAINS, the sums that an output of A x is
 * made of, and the blocks whose accumulators are in registers: SHRINK_ROWS by CHAINS, EXPAND_ROWS by EXPAND_TILES. No sum
 * depends on the rows beside its own. */

#define AHEAD 2048  /* bytes from the numbers being read to those prefetched meanwhile */
#define ROW_TILES 4 /* of a block of one row */

INLINE int64_t float_bytes(const int dtype)
{
    return dtype == QS_F32 ? 4 : 2;
}

/* out = scale * A x for MR rows. The inputs go to CHAINS sums in turn, since one chain of additions would wait for
 * itself. */
INLINE void shrink_block(const qs_lora *op, const qs_adapter *adapter, const float *x, float *out, const int MR,
                         const int dtype)
{
    const int64_t width = op->width, whole = width - width % CHAINS, size = QS_LANES * float_bytes(dtype);
    const uint8_t *a = adapter->a;
    for (int32_t tile = 0; tile < adapter->rank; tile += QS_LANES, a += width * size) {
        vf sums[SHRINK_ROWS][CHAINS][PARTS], w[PARTS];
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int c = 0; c < CHAINS; c++)
                UNROLL for (int p = 0; p < PARTS; p++)
                    sums[m][c][p] = all(0.0f);
        for (int64_t k = 0; k < whole; k += CHAINS)
            UNROLL for (int c = 0; c < CHAINS; c++) {
                if (dtype == QS_F32 || c % 2 == 0)
                    __builtin_prefetch(a + (k + c) * size + AHEAD, 0, 2);
                UNROLL for (int p = 0; p < PARTS; p++)
                    w[p] = load_floats(a + (k + c) * size, p * LANES, dtype);
                UNROLL for (int m = 0; m < MR; m++)
                    UNROLL for (int p = 0; p < PARTS; p++)
                        sums[m][c][p] = fused(all(x[m * width + k + c]), w[p], sums[m][c][p]);
            }
        for (int64_t k = whole; k < width; k++)
            UNROLL for (int m = 0; m < MR; m++)
                UNROLL for (int p = 0; p < PARTS; p++)
                    sums[m][0][p] = fused(all(x[m * width + k]), load_floats(a + k * size, p * LANES, dtype), sums[m][0][p]);
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int p = 0; p < PARTS; p++) {
                UNROLL for (int c = 1; c < CHAINS; c++)
                    sums[m][0][p] = sums[m][0][p] + sums[m][c][p];
                store(out + m * qs_shrunk_stride(op) + tile + p * LANES, sums[m][0][p] * all(adapter->scale));
            }
    }
}

/* out += B shrunk, for MR rows and NT tiles. */
INLINE void expand_block(const qs_lora *op, const qs_adapter *adapter, const uint8_t *b, const float *shrunk, float *out,
                         int64_t out_stride, const int MR, const int NT, const int dtype)
{
    const int NV = NT * PARTS;
    const int64_t rank = adapter->rank;
    vf sums[EXPAND_ROWS][ROW_TILES * PARTS], w[ROW_TILES * PARTS];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            sums[m][v] = load(out + m * out_stride + v * LANES);
    for (int64_t j = 0; j < rank; j++) {
        UNROLL for (int v = 0; v < NV; v++) {
            const int64_t at = (v / PARTS * rank + j) * QS_LANES + v % PARTS * LANES;
            w[v] = load_floats(b, at, dtype);
            if (v % PARTS == 0 && (dtype == QS_F32 || j % 2 == 0))
                __builtin_prefetch(b + at * float_bytes(dtype) + AHEAD, 0, 2);
        }
        UNROLL for (int m = 0; m < MR; m++) {
            vf value = all(shrunk[m * qs_shrunk_stride(op) + j]);
            UNROLL for (int v = 0; v < NV; v++)
                sums[m][v] = fused(value, w[v], sums[m][v]);
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            store(out + m * out_stride + v * LANES, sums[m][v]);
}

/* All rows by NT tiles. */
INLINE void expand_tiles(const qs_lora *op, const qs_adapter *adapter, const uint8_t *b, const float *shrunk, float *out,
                         int32_t rows, const int NT, const int dtype)
{
    int64_t row = 0;
#define EXPAND_ROWS_OF(MR)                                                                                        \
    for (; MR <= EXPAND_ROWS && row + MR <= rows; row += MR)                                                      \
        expand_block(op, adapter, b, shrunk + row * qs_shrunk_stride(op), out + row * op->out_stride,             \
                     op->out_stride, MR <= EXPAND_ROWS ? MR : 1, NT, dtype);
    EXPAND_ROWS_OF(6)
    EXPAND_ROWS_OF(4)
    EXPAND_ROWS_OF(2)
    EXPAND_ROWS_OF(1)
#undef EXPAND_ROWS_OF
}

INLINE void expand_as(const qs_lora *op, const qs_adapter *adapter, const float *shrunk, float *out, int32_t rows,
                      int32_t tile, int32_t columns, const int dtype)
{
    const int64_t stride = adapter->rank * QS_LANES * float_bytes(dtype);
    const uint8_t *b = (const uint8_t *)adapter->b + tile * stride;
    const int32_t whole = columns / QS_LANES, edge = columns % QS_LANES;
    int32_t t = 0;
    for (; rows == 1 && t + ROW_TILES <= whole; t += ROW_TILES)
        expand_block(op, adapter, b + t * stride, shrunk, out + t * QS_LANES, 0, 1, ROW_TILES, dtype);
    if (EXPAND_TILES > 1)
        for (; t + EXPAND_TILES <= whole; t += EXPAND_TILES)
            expand_tiles(op, adapter, b + t * stride, shrunk, out + t * QS_LANES, rows, EXPAND_TILES, dtype);
    for (; t < whole; t++)
        expand_tiles(op, adapter, b + t * stride, shrunk, out + t * QS_LANES, rows, 1, dtype);
    for (int64_t row = 0; row < rows && edge; row++) { /* by a copy of the last tile */
        float copy[QS_LANES] = {0}, *last = out + row * op->out_stride + t * QS_LANES;
        memcpy(copy, last, sizeof(float) * (size_t)edge);
        expand_block(op, adapter, b + t * stride, shrunk + row * qs_shrunk_stride(op), copy, 0, 1, 1, dtype);
        memcpy(last, copy, sizeof(float) * (size_t)edge);
    }
}

INLINE void shrink_as(const qs_lora *op, const qs_adapter *adapter, const float *x, float *out, int32_t rows,
                      const int dtype)
{
    const int64_t width = op->width, stride = qs_shrunk_stride(op);
    int64_t row = 0;
    for (; SHRINK_ROWS >= 4 && row + 4 <= rows; row += 4)
        shrink_block(op, adapter, x + row * width, out + row * stride, SHRINK_ROWS >= 4 ? 4 : 1, dtype);
    for (; SHRINK_ROWS >= 2 && row + 2 <= rows; row += 2)
        shrink_block(op, adapter, x + row * width, out + row * stride, SHRINK_ROWS >= 2 ? 2 : 1, dtype);
    for (; row < rows; row++)
        shrink_block(op, adapter, x + row * width, out + row * stride, 1, dtype);
}

static void shrink(const qs_lora *op, const qs_adapter *adapter, const float *x, float *out, int32_t rows)
{
    switch (adapter->a_dtype) {
    case QS_F32: shrink_as(op, adapter, x, out, rows, QS_F32); break;
    case QS_F16: shrink_as(op, adapter, x, out, rows, QS_F16); break;
    case QS_BF16: shrink_as(op, adapter, x, out, rows, QS_BF16); break;
    }
}

static void expand(const qs_lora *op, const qs_adapter *adapter, const float *shrunk, float *out, int32_t rows,
                   int32_t tile, int32_t columns)
{
    switch (adapter->b_dtype) {
    case QS_F32: expand_as(op, adapter, shrunk, out, rows, tile, columns, QS_F32); break;
    case QS_F16: expand_as(op, adapter, shrunk, out, rows, tile, columns, QS_F16); break;
    case QS_BF16: expand_as(op, adapter, shrunk, out, rows, tile, columns, QS_BF16); break;
    }
}
