/* Products of floats over vectors, behind store_tiles.h. An ISA defines FLOAT_TILES, the tiles of a block of 6 rows: as
 * many as have accumulators in registers. */

#define UNPACK 32 /* from this many rows on, e4m3 tiles are unpacked once and reused */

/* `scale`: of e4m3 weights, times 256; otherwise not read. */
INLINE vf load_weight(const void *weight, int64_t at, vf scale, const int dtype)
{
    return dtype == QS_F8 ? load_e4m3((const uint8_t *)weight + at) * scale : load_floats(weight, at, dtype);
}

INLINE vf e4m3_scale(const qs_linear *op, int64_t group, int p)
{
    return load((const float *)op->scales + group * QS_LANES + p * LANES) * all(256.0f);
}

INLINE void float_block(const qs_linear *op, const float *input, const void *weight, int32_t row, int32_t tile,
                        const int MR, const int NT, const int dtype)
{
    enum { WIDE = FLOAT_TILES * PARTS };
    const int NV = NT * PARTS;
    vf sums[6][WIDE], scale[WIDE], w[WIDE];
    const float *x = input + (int64_t)row * op->x_stride;
    int64_t stride = (int64_t)op->k * QS_LANES;
    int32_t group = dtype == QS_F8 ? op->group : op->k, groups = (op->k + group - 1) / group;
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            sums[m][v] = all(0.0f);
    for (int32_t g = 0, k = 0; g < groups; g++) {
        int32_t end = op->k - k < group ? op->k : k + group;
        UNROLL for (int v = 0; v < NV; v++)
            scale[v] = dtype == QS_F8 ? e4m3_scale(op, (int64_t)(tile + v / PARTS) * groups + g, v % PARTS) : all(0.0f);
        for (; k < end; k++) {
            UNROLL for (int v = 0; v < NV; v++)
                w[v] = load_weight(weight, v / PARTS * stride + (int64_t)k * QS_LANES + v % PARTS * LANES, scale[v], dtype);
            UNROLL for (int m = 0; m < MR; m++) {
                vf value = all(x[(int64_t)m * op->x_stride + k]);
                UNROLL for (int v = 0; v < NV; v++)
                    sums[m][v] = fused(value, w[v], sums[m][v]);
            }
        }
    }
    float of_block[6 * WIDE * LANES] __attribute__((aligned(64)));
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int v = 0; v < NV; v++)
            store(of_block + (m * NV + v) * LANES, sums[m][v]);
    store_block(op, of_block, row, tile, MR, NT);
}

#define FLOAT_BLOCKS(MR, NT, dtype)                                                                               \
    for (; row + MR <= end; row += MR)                                                                            \
        float_block(op, x, weight, row, tile, MR, NT, dtype);
#define FLOAT_KERNEL(name, NT, dtype)                                                                             \
    static void name(const qs_linear *op, const float *x, int32_t row, int32_t end, int32_t tile,                 \
                     const void *weight)                                                                          \
    {                                                                                                             \
        FLOAT_BLOCKS(6, NT, dtype)                                                                                \
        FLOAT_BLOCKS(4, NT, dtype)                                                                                \
        FLOAT_BLOCKS(2, NT, dtype)                                                                                \
        FLOAT_BLOCKS(1, NT, dtype)                                                                                \
    }

FLOAT_KERNEL(f32_narrow, 1, QS_F32)
FLOAT_KERNEL(f16_narrow, 1, QS_F16)
FLOAT_KERNEL(bf16_narrow, 1, QS_BF16)
FLOAT_KERNEL(f8_narrow, 1, QS_F8)
#if FLOAT_TILES > 1
FLOAT_KERNEL(f32_wide, FLOAT_TILES, QS_F32)
FLOAT_KERNEL(f16_wide, FLOAT_TILES, QS_F16)
FLOAT_KERNEL(bf16_wide, FLOAT_TILES, QS_BF16)
FLOAT_KERNEL(f8_wide, FLOAT_TILES, QS_F8)
#endif

/* Tiles of e4m3 as f32, exactly the values that a block computes on the fly. */
static void unpack_f8(const qs_linear *op, int32_t tile, int32_t tiles, float *unpacked)
{
    const uint8_t *codes = (const uint8_t *)op->weight + (int64_t)tile * op->k * QS_LANES;
    int32_t groups = (op->k + op->group - 1) / op->group;
    for (int32_t t = tile; t < tile + tiles; t++)
        for (int32_t g = 0, k = 0; g < groups; g++) {
            int32_t end = op->k - k < op->group ? op->k : k + op->group;
            vf scale[PARTS];
            UNROLL for (int p = 0; p < PARTS; p++)
                scale[p] = e4m3_scale(op, (int64_t)t * groups + g, p);
            for (; k < end; k++, codes += QS_LANES, unpacked += QS_LANES)
                UNROLL for (int p = 0; p < PARTS; p++)
                    store(unpacked + p * LANES, load_weight(codes, p * LANES, scale[p], QS_F8));
        }
}

static void linear_float(const qs_linear *op, const float *x, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                         float *unpacked)
{
    typedef void (*kernel)(const qs_linear *, const float *, int32_t, int32_t, int32_t, const void *);
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
    int32_t t = 0;
#if FLOAT_TILES > 1
    static const kernel wide[] = {[QS_F32] = f32_wide, [QS_F16] = f16_wide, [QS_BF16] = bf16_wide, [QS_F8] = f8_wide};
    for (; t + FLOAT_TILES <= tiles; t += FLOAT_TILES)
        wide[dtype](op, x, row, end, tile + t, weight + t * stride);
#endif
    for (; t < tiles; t++)
        narrow[dtype](op, x, row, end, tile + t, weight + t * stride);
    end_streams();
}
