/* The products of adapters (LoRA) over vectors, behind rows.h. An ISA defines CHAINS, the sums that each output of a row
 * is made of, and SHRINK_ROWS and EXPAND_ROWS by EXPAND_TILES, the blocks whose accumulators are in registers. Neither the
 * order of a sum nor its chains depend on the rows beside it. */

#define SHRINK_AHEAD 2048 /* bytes from the numbers being read to those prefetched meanwhile */

INLINE int64_t float_bytes(const int dtype)
{
    return dtype == QS_F32 ? 4 : 2;
}

INLINE void prefetch_bytes(const void *from, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)from + i, 0, 2);
}

/* out = scale * A x for MR rows. The sum of each output has CHAINS terms in turn: one chain of additions for few rows
 * would wait for itself. */
INLINE void shrink_block(const qs_lora *op, const qs_adapter *adapter, const float *x, float *out, const int MR,
                         const int dtype)
{
    const int32_t width = op->width, whole = width - width % CHAINS;
    const int64_t step = CHAINS * QS_LANES * float_bytes(dtype);
    const uint8_t *a = adapter->a;
    for (int32_t tile = 0; tile < adapter->rank; tile += QS_LANES, a += width % CHAINS * step / CHAINS) {
        vf sums[SHRINK_ROWS][CHAINS][PARTS], w[PARTS];
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int c = 0; c < CHAINS; c++)
                UNROLL for (int p = 0; p < PARTS; p++)
                    sums[m][c][p] = all(0.0f);
        for (int32_t k = 0; k < whole; k += CHAINS, a += step) {
            prefetch_bytes(a + SHRINK_AHEAD, step);
            UNROLL for (int c = 0; c < CHAINS; c++) {
                UNROLL for (int p = 0; p < PARTS; p++)
                    w[p] = load_floats(a, c * QS_LANES + p * LANES, dtype);
                UNROLL for (int m = 0; m < MR; m++) {
                    vf value = all(x[(int64_t)m * width + k + c]);
                    UNROLL for (int p = 0; p < PARTS; p++)
                        sums[m][c][p] = fused(value, w[p], sums[m][c][p]);
                }
            }
        }
        UNROLL for (int c = 0; c < CHAINS - 1; c++)
            UNROLL for (int m = 0; m < MR && whole + c < width; m++)
                UNROLL for (int p = 0; p < PARTS; p++)
                    sums[m][c][p] = fused(all(x[(int64_t)m * width + whole + c]),
                                          load_floats(a, c * QS_LANES + p * LANES, dtype), sums[m][c][p]);
        UNROLL for (int m = 0; m < MR; m++)
            UNROLL for (int p = 0; p < PARTS; p++) {
                UNROLL for (int c = 1; c < CHAINS; c++)
                    sums[m][0][p] = sums[m][0][p] + sums[m][c][p];
                store(out + (int64_t)m * qs_shrunk_stride(op) + tile + p * LANES, sums[m][0][p] * all(adapter->scale));
            }
    }
}

/* out += B shrunk, for MR rows and NT tiles. Where `ahead` is set, the tiles behind them are prefetched. */
INLINE void expand_block(const qs_lora *op, const qs_adapter *adapter, const uint8_t *b, const float *shrunk, float *out,
                         int64_t out_stride, int64_t ahead, const int MR, const int NT, const int dtype)
{
    enum { WIDE = EXPAND_TILES * PARTS };
    const int NV = NT * PARTS;
    const int32_t rank = adapter->rank;
    vf sums[EXPAND_ROWS][WIDE], w[WIDE];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            sums[m][v] = load(out + m * out_stride + v * LANES);
    for (int32_t j = 0; j < rank; j++) {
        UNROLL for (int v = 0; v < NV; v++) {
            int64_t at = ((int64_t)(v / PARTS) * rank + j) * QS_LANES + v % PARTS * LANES;
            w[v] = load_floats(b, at, dtype);
            if (ahead && (dtype == QS_F32 || j % 2 == 0) && v % PARTS == 0)
                __builtin_prefetch(b + at * float_bytes(dtype) + ahead, 0, 2);
        }
        UNROLL for (int m = 0; m < MR; m++) {
            vf value = all(shrunk[(int64_t)m * qs_shrunk_stride(op) + j]);
            UNROLL for (int v = 0; v < NV; v++)
                sums[m][v] = fused(value, w[v], sums[m][v]);
        }
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            store(out + m * out_stride + v * LANES, sums[m][v]);
}

/* A last tile that is not whole, by a copy of it. */
INLINE void expand_edge(const qs_lora *op, const qs_adapter *adapter, const uint8_t *b, const float *shrunk, float *out,
                        int32_t lanes, const int dtype)
{
    float tile[QS_LANES] = {0};
    memcpy(tile, out, sizeof(float) * (size_t)lanes);
    expand_block(op, adapter, b, shrunk, tile, 0, 0, 1, 1, dtype);
    memcpy(out, tile, sizeof(float) * (size_t)lanes);
}

#define SHRINK_BLOCKS(MR, dtype)                                                                                  \
    for (; MR <= SHRINK_ROWS && rows >= MR; rows -= MR, x += (int64_t)MR * op->width, out += MR * qs_shrunk_stride(op)) \
        shrink_block(op, adapter, x, out, MR <= SHRINK_ROWS ? MR : 1, dtype);
#define EXPAND_BLOCKS(MR, NT, dtype)                                                                              \
    for (; MR <= EXPAND_ROWS && row + MR <= rows; row += MR)                                                      \
        expand_block(op, adapter, b, shrunk + row * qs_shrunk_stride(op), out + row * op->out_stride,             \
                     op->out_stride, row ? 0 : ahead, MR <= EXPAND_ROWS ? MR : 1, NT, dtype);
#define EXPAND_TILE(NT, dtype)                                                                                    \
    for (; t + NT <= whole; t += NT, b += NT * stride, out += NT * QS_LANES) {                                    \
        int64_t row = 0;                                                                                          \
        EXPAND_BLOCKS(6, NT, dtype)                                                                               \
        EXPAND_BLOCKS(4, NT, dtype)                                                                               \
        EXPAND_BLOCKS(2, NT, dtype)                                                                               \
        EXPAND_BLOCKS(1, NT, dtype)                                                                               \
    }
#define ADAPTER_KERNELS(name, dtype)                                                                              \
    static void shrink_##name(const qs_lora *op, const qs_adapter *adapter, const float *x, float *out, int32_t rows) \
    {                                                                                                             \
        SHRINK_BLOCKS(4, dtype)                                                                                   \
        SHRINK_BLOCKS(2, dtype)                                                                                   \
        SHRINK_BLOCKS(1, dtype)                                                                                   \
    }                                                                                                             \
    static void expand_##name(const qs_lora *op, const qs_adapter *adapter, const float *shrunk, float *out,      \
                              int32_t rows, int32_t tile, int32_t columns)                                        \
    {                                                                                                             \
        const int64_t stride = adapter->rank * QS_LANES * float_bytes(dtype), ahead = stride * EXPAND_TILES;      \
        const uint8_t *b = (const uint8_t *)adapter->b + tile * stride;                                           \
        const int32_t whole = columns / QS_LANES;                                                                 \
        int32_t t = 0;                                                                                            \
        EXPAND_TILE(EXPAND_TILES, dtype)                                                                          \
        if (EXPAND_TILES > 1)                                                                                     \
            EXPAND_TILE(1, dtype)                                                                                 \
        for (int64_t row = 0; row < rows && columns % QS_LANES; row++)                                            \
            expand_edge(op, adapter, b, shrunk + row * qs_shrunk_stride(op), out + row * op->out_stride,          \
                        columns % QS_LANES, dtype);                                                               \
    }

ADAPTER_KERNELS(f32, QS_F32)
ADAPTER_KERNELS(f16, QS_F16)
ADAPTER_KERNELS(bf16, QS_BF16)

static void shrink(const qs_lora *op, const qs_adapter *adapter, const float *x, float *out, int32_t rows)
{
    (adapter->a_dtype == QS_F32   ? shrink_f32
     : adapter->a_dtype == QS_F16 ? shrink_f16
                                  : shrink_bf16)(op, adapter, x, out, rows);
}

static void expand(const qs_lora *op, const qs_adapter *adapter, const float *shrunk, float *out, int32_t rows,
                   int32_t tile, int32_t columns)
{
    (adapter->b_dtype == QS_F32   ? expand_f32
     : adapter->b_dtype == QS_F16 ? expand_f16
                                  : expand_bf16)(op, adapter, shrunk, out, rows, tile, columns);
}
