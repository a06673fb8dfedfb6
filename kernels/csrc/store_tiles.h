/* How every product over vectors stores its sums: with their bias, through SiLU, added to what is there. Behind rows.h. */

#define FAR 16384 /* outputs, as of a vocabulary: written past the caches, which they would leave unread */

/* A row of the output: the sums of `tiles` tiles, QS_LANES each. Of two and more, gates come with what they are multiplied
 * with; one alone waits in the output for that. */
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
                stream(out + i, value); /* others see it behind the fence that ends a piece */
            else
                store(out + i, value);
        }
    }
}
