/* How every product over vectors stores its sums: with bias, through an activation or a soft cap, added to the output.
 * Behind rows.h. */

#define FAR 16384 /* outputs, as many as a vocabulary has: written past the caches, which would evict them unread */
#define NEAR (128 << 10) /* bytes, a part of the second-level cache: the farthest prefetch */

/* A row of the output: the sums of `tiles` tiles, QS_LANES each. With two or more tiles, each gate comes with its
 * factor; a single gate tile waits in the output for its factor. */
static __attribute__((noinline)) void store_tiles(const qs_linear *op, const float *sums, int32_t row, int32_t tile,
                                                  int32_t tiles)
{
    const int paired = op->gated && tiles > 1, past = op->n >= FAR;
    for (int32_t t = paired; t < tiles; t += 1 + paired) {
        const int32_t start = (tile + t) * QS_LANES, lanes = op->n - start;
        const float *of_tile = sums + t * QS_LANES, *bias = op->bias + start;
        float *out = op->out + (int64_t)row * op->out_stride + (op->gated ? (tile + t) / 2 * QS_LANES : start);
        for (int32_t i = 0; i < lanes && lanes < QS_LANES; i++) {
            float value = op->bias ? of_tile[i] + bias[i] : of_tile[i];
            value = op->gated ? value : QS_NAME(activated)(value, op->function);
            if (op->cap != 0.0f)
                value = QS_NAME(capped)(value, op->cap);
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
                value = gated(gate, value, op->function);
            } else if (op->gated && (tile + t) % 2)
                value = gated(load(out + i), value, op->function);
            else if (!op->gated)
                value = activated(value, op->function);
            if (op->cap != 0.0f)
                value = capped(value, op->cap);
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
    const int32_t start = tile * QS_LANES, apart = QS_LANES * (1 + op->gated);
    for (int m = 0; m < rows && op->n < FAR; m++)
        for (int32_t i = start; i < start + tiles * QS_LANES; i += apart)
            __builtin_prefetch(op->out + (int64_t)(row + m) * op->out_stride + i / (1 + op->gated), 1);
}

/* Joins each gate of `pairs` with its factor, behind it, in the place of the gate. */
static __attribute__((noinline)) void join(float *sums, int pairs, int32_t function)
{
#define JOIN(known)                                                                                               \
    case known:                                                                                                   \
        for (float *end = sums + pairs * 2 * QS_LANES; sums < end; sums += 2 * QS_LANES)                          \
            UNROLL for (int i = 0; i < QS_LANES; i += LANES)                                                      \
                store(sums + i, gated(load(sums + i), load(sums + QS_LANES + i), known));                         \
        break;
    switch (function) {
        JOIN(QS_SILU)
        JOIN(QS_GELU)
        JOIN(QS_GELU_TANH)
        JOIN(QS_RELU)
        JOIN(QS_RELU2)
        JOIN(QS_SWIGLUOAI)
    }
#undef JOIN
}

/* Stores a block of the output, of `rows` by `tiles`, both constants. Activations of all rows at once: each is a long
 * chain of dependent operations. Overwrites the sums. */
INLINE void store_block(const qs_linear *op, float *sums, int32_t row, int32_t tile, const int rows, const int tiles)
{
    const int32_t start = tile * QS_LANES, apart = tiles * QS_LANES;
    float *out = op->out + (int64_t)row * op->out_stride + (op->gated ? start / 2 : start);
    if (op->bias || op->cap != 0.0f || op->n >= FAR || op->n - start < apart || (op->gated && tiles % 2)) {
        for (int m = 0; m < rows; m++)
            store_tiles(op, sums + m * apart, row + m, tile, tiles);
        return;
    }
    if (op->gated) {
        join(sums, rows * tiles / 2, op->function);
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int i = 0; i < apart / 2; i += LANES)
                store(out + (int64_t)m * op->out_stride + i, load(sums + m * apart + i / QS_LANES * QS_LANES + i));
        return;
    }
    if (op->function)
        activate(sums, NULL, sums, rows * apart, op->function);
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int i = 0; i < apart; i += LANES) {
            float *to = out + (int64_t)m * op->out_stride + i;
            vf value = load(sums + m * apart + i);
            store(to, op->accumulate ? load(to) + value : value);
        }
}
