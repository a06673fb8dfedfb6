/* How every product over vectors stores its sums: with bias, through SiLU, added to the output. Behind rows.h. */

#define FAR 16384 /* outputs, as many as a vocabulary has: written past the caches, which would evict them unread */

/* A row of the output: the sums of `tiles` tiles, QS_LANES each. With two or more tiles, each gate comes with its
 * factor; a single gate tile waits in the output for its factor. */
static __attribute__((noinline)) void store_tiles(const qs_linear *op, const float *sums, int32_t row, int32_t tile,
                                                  int32_t tiles)
{
    const int paired = op->silu && tiles > 1, past = op->n >= FAR;
    for (int32_t t = paired; t < tiles; t += 1 + paired) {
        const int32_t start = (tile + t) * QS_LANES, lanes = op->n - start;
        const float *of_tile = sums + t * QS_LANES, *bias = op->bias + start;
        float *out = op->out + (int64_t)row * op->out_stride + (op->silu ? (tile + t) / 2 * QS_LANES : start);
        for (int32_t i = 0; i < lanes && lanes < QS_LANES; i++) {
            float value = op->bias ? of_tile[i] + bias[i] : of_tile[i];
            out[i] = op->accumulate ? out[i] + value : value;
        }
        for (int32_t i = 0; i < QS_LANES && lanes >= QS_LANES; i += LANES) {
            vf value = load(of_tile + i);
            if (op->bias)
                value = value + load(bias + i);
            if (paired) {
                vf gate = load(of_tile - QS_LANES + i);
                if (op->bias)
                    gate = gate + load(bias - QS_LANES + i);
                value = value * silu(gate);
            } else if (op->silu && (tile + t) % 2)
                value = value * silu(load(out + i));
            if (op->accumulate)
                value = load(out + i) + value;
            if (past && (uintptr_t)out % 64 == 0)
                stream(out + i, value); /* others see it after the fence that ends a piece */
            else
                store(out + i, value);
        }
    }
}

/* Prefetches the lines of a block of the output, of `rows` by `tiles`, while its sums are made. With a long prompt they
 * are in memory, and the stores would wait (gates of 512 rows: 181 GMAC/s a core instead of 165). */
INLINE void fetch_block(const qs_linear *op, int32_t row, int32_t tile, const int rows, const int tiles)
{
    const int32_t start = tile * QS_LANES, apart = QS_LANES * (1 + op->silu);
    for (int m = 0; m < rows && op->n < FAR; m++)
        for (int32_t i = start; i < start + tiles * QS_LANES; i += apart)
            __builtin_prefetch(op->out + (int64_t)(row + m) * op->out_stride + i / (1 + op->silu), 1);
}

/* Stores a block of the output, of `rows` by `tiles`, both constants. All rows at once: a SiLU is a long chain of
 * dependent operations. */
INLINE void store_block(const qs_linear *op, const float *sums, int32_t row, int32_t tile, const int rows, const int tiles)
{
    const int32_t start = tile * QS_LANES;
    float *out = op->out + (int64_t)row * op->out_stride + (op->silu ? start / 2 : start);
    if (op->bias || op->n >= FAR || op->n - start < tiles * QS_LANES || (op->silu && tiles % 2)) {
        for (int m = 0; m < rows; m++)
            store_tiles(op, sums + m * tiles * QS_LANES, row + m, tile, tiles);
    } else if (op->silu) {
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int i = 0; i < tiles / 2 * QS_LANES; i += LANES) {
                const float *gate = sums + (m * tiles + i / QS_LANES) * QS_LANES + i;
                store(out + (int64_t)m * op->out_stride + i, load(gate + QS_LANES) * silu(load(gate)));
            }
    } else {
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int i = 0; i < tiles * QS_LANES; i += LANES) {
                float *to = out + (int64_t)m * op->out_stride + i;
                vf value = load(sums + m * tiles * QS_LANES + i);
                store(to, op->accumulate ? load(to) + value : value);
            }
    }
}
