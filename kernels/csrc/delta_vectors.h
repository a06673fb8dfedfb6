/* The causal convolution and the gated delta rule over vectors; behind rows.h. */

/* `lanes` numbers, and zeros behind them. */
INLINE vf load_part(const float *from, int32_t lanes)
{
    if (lanes == LANES)
        return load(from);
    float held[LANES] = {0};
    memcpy(held, from, sizeof(float) * (size_t)lanes);
    return load(held);
}

INLINE void store_part(float *to, vf x, int32_t lanes)
{
    if (lanes == LANES) {
        store(to, x);
        return;
    }
    float held[LANES];
    store(held, x);
    memcpy(to, held, sizeof(float) * (size_t)lanes);
}

/* `lanes` channels, of an operation of this width. */
#define CONV_WIDTH 4
INLINE void convolve_channels(const qs_causal_conv *op, float *x, float *state, int32_t tokens, int32_t begins,
                              int32_t first, int32_t lanes)
{
    vf inputs[CONV_WIDTH], weights[CONV_WIDTH];
    UNROLL for (int j = 0; j < CONV_WIDTH; j++)
        weights[j] = load_part(op->weight + (int64_t)j * op->channels + first, lanes);
    UNROLL for (int j = 0; j < CONV_WIDTH - 1; j++)
        inputs[j] = begins ? all(0.0f) : load_part(state + (int64_t)j * op->channels + first, lanes);
    for (int32_t t = 0; t < tokens; t++) {
        float *at = x + (int64_t)t * op->x_stride + first;
        inputs[CONV_WIDTH - 1] = load_part(at, lanes);
        vf sum = inputs[0] * weights[0];
        UNROLL for (int j = 1; j < CONV_WIDTH; j++)
            sum = fused(inputs[j], weights[j], sum);
        store_part(at, silu(sum), lanes);
        UNROLL for (int j = 1; j < CONV_WIDTH; j++)
            inputs[j - 1] = inputs[j];
    }
    UNROLL for (int j = 0; j < CONV_WIDTH - 1; j++)
        store_part(state + (int64_t)j * op->channels + first, inputs[j], lanes);
}

/* The bits of a channel do not depend on its place: ranks have it at places of their own. */
static void convolve(const qs_causal_conv *op, float *x, float *state, int32_t tokens, int32_t begins, int32_t first,
                     int32_t last)
{
    if (op->width != CONV_WIDTH) {
        QS_NAME(convolve)(op, x, state, tokens, begins, first, last);
        return;
    }
    for (; first + LANES <= last; first += LANES)
        convolve_channels(op, x, state, tokens, begins, first, LANES);
    if (first < last)
        convolve_channels(op, x, state, tokens, begins, first, last - first);
}

/* x times scale / sqrt(|x|^2 + 1e-6) */
INLINE void unit(const float *x, float *out, int32_t width, float scale)
{
    const float inverse = scale / sqrtf(total_of(x, width, 0.0f, 1) + 1e-6f);
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES)
        store(out + j, load(x + j) * all(inverse));
    for (; j < width; j++)
        out[j] = x[j] * inverse;
}

INLINE float dot(const float *x, const float *y, int32_t width)
{
    vf sums = all(0.0f);
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES)
        sums = fused(load(x + j), load(y + j), sums);
    float total = sum(sums);
    for (; j < width; j++)
        total += x[j] * y[j];
    return total;
}

/* The columns of a state do not meet, so some go through all tokens while they stay in the first cache. One pass over
 * them does both what a token changes and what the next one reads. */
#define COLUMNS 32
#define COLUMN_PARTS (COLUMNS / LANES)

INLINE void delta_columns(const qs_gated_delta *op, const float *x, float *out, float *state, int32_t tokens,
                          int32_t begins, int32_t head, int32_t first)
{
    const int32_t key_dim = op->key_dim, dim = op->value_dim;
    const int64_t row = qs_delta_width(op);
    const float scale = 1.0f / sqrtf((float)key_dim);
    float keys[2][QS_MAX_KEY_DIM], queries[QS_MAX_KEY_DIM], held[QS_MAX_KEY_DIM * COLUMNS];
    vf known[COLUMN_PARTS], asked[COLUMN_PARTS], change[COLUMN_PARTS];
    QS_NAME(delta_inputs) in = QS_NAME(delta_inputs_of)(op, x, head);
    unit(in.k, keys[0], key_dim, 1.0f);
    unit(in.q, queries, key_dim, scale);
    UNROLL for (int p = 0; p < COLUMN_PARTS; p++)
        known[p] = asked[p] = all(0.0f);
    for (int32_t i = 0; i < key_dim; i++)
        UNROLL for (int p = 0; p < COLUMN_PARTS; p++) {
            vf s = begins ? all(0.0f) : load(state + (int64_t)i * dim + first + p * LANES);
            store(held + i * COLUMNS + p * LANES, s);
            known[p] = fused(s, all(keys[0][i]), known[p]);
            asked[p] = fused(s, all(queries[i]), asked[p]);
        }
    for (int32_t t = 0; t < tokens; t++) {
        const float *key = keys[t & 1], *next = keys[~t & 1];
        const float decay = QS_NAME(decay)(op, *in.a, head), beta = QS_NAME(sigmoid)(*in.b);
        const float own = dot(key, queries, key_dim); /* of what this token changes, its query reads so much */
        float *y = out + (int64_t)t * op->out_stride + head * dim + first;
        UNROLL for (int p = 0; p < COLUMN_PARTS; p++) {
            change[p] = (load(in.v + first + p * LANES) - known[p] * all(decay)) * all(beta);
            store(y + p * LANES, fused(change[p], all(own), asked[p] * all(decay)));
            known[p] = asked[p] = all(0.0f);
        }
        if (t + 1 == tokens) {
            for (int32_t i = 0; i < key_dim; i++)
                UNROLL for (int p = 0; p < COLUMN_PARTS; p++)
                    store(state + (int64_t)i * dim + first + p * LANES,
                          fused(all(key[i]), change[p], load(held + i * COLUMNS + p * LANES) * all(decay)));
            return;
        }
        in = QS_NAME(delta_inputs_of)(op, x + (t + 1) * row, head);
        unit(in.k, keys[~t & 1], key_dim, 1.0f);
        unit(in.q, queries, key_dim, scale);
        for (int32_t i = 0; i < key_dim; i++)
            UNROLL for (int p = 0; p < COLUMN_PARTS; p++) {
                vf s = fused(all(key[i]), change[p], load(held + i * COLUMNS + p * LANES) * all(decay));
                store(held + i * COLUMNS + p * LANES, s);
                known[p] = fused(s, all(next[i]), known[p]);
                asked[p] = fused(s, all(queries[i]), asked[p]);
            }
    }
}

static void delta(const qs_gated_delta *op, const float *x, float *out, float *state, int32_t tokens, int32_t begins,
                  int32_t head)
{
    const int32_t dim = op->value_dim;
    if (dim % COLUMNS) {
        QS_NAME(delta)(op, x, out, state, tokens, begins, head);
        return;
    }
    for (int32_t first = 0; first < dim; first += COLUMNS)
        delta_columns(op, x, out, state, tokens, begins, head, first);
    for (int32_t t = 0; t < tokens; t++) {
        float *y = out + (int64_t)t * op->out_stride + head * dim;
        rmsnorm(y, op->norm, y, dim, op->eps);
        activate(QS_NAME(delta_inputs_of)(op, x + t * qs_delta_width(op), head).z, y, y, dim, QS_SILU);
    }
}
