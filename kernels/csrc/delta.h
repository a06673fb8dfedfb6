/* The causal convolution and the gated delta rule, in portable C; behind portable.h's functions. */

/* Channels first .. last - 1 of a sequence's `tokens`, the first of which is at x. */
static void QS_NAME(convolve)(const qs_causal_conv *op, float *x, float *state, int32_t tokens, int32_t begins,
                              int32_t first, int32_t last)
{
    const int32_t held = op->width - 1, channels = op->channels;
    for (int32_t c = first; c < last; c++) {
        float inputs[QS_MAX_CONV];
        for (int32_t j = 0; j < held; j++)
            inputs[j] = begins ? 0.0f : state[(int64_t)j * channels + c];
        for (int32_t t = 0; t < tokens; t++) {
            float *at = x + (int64_t)t * op->x_stride + c, sum = 0.0f;
            inputs[held] = *at;
            for (int32_t j = 0; j <= held; j++)
                sum += op->weight[(int64_t)j * channels + c] * inputs[j];
            *at = QS_NAME(silu)(sum);
            memmove(inputs, inputs + 1, sizeof(float) * (size_t)held);
        }
        for (int32_t j = 0; j < held; j++)
            state[(int64_t)j * channels + c] = inputs[j];
    }
}

/* What a head reads of a token: its query and its key, its value and its gate, and the numbers b and a. */
typedef struct {
    const float *q, *k, *v, *z, *b, *a;
} QS_NAME(delta_inputs);

static inline QS_NAME(delta_inputs) QS_NAME(delta_inputs_of)(const qs_gated_delta *op, const float *row, int32_t head)
{
    const int64_t keys = (int64_t)op->key_heads * op->key_dim, values = (int64_t)op->heads * op->value_dim;
    QS_NAME(delta_inputs) in;
    in.q = row + (int64_t)(head / (op->heads / op->key_heads)) * op->key_dim;
    in.k = in.q + keys;
    in.v = row + 2 * keys + (int64_t)head * op->value_dim;
    in.z = in.v + values;
    in.b = row + 2 * keys + 2 * values + head;
    in.a = in.b + op->heads;
    return in;
}

/* What is left of the state after a token. */
static inline float QS_NAME(decay)(const qs_gated_delta *op, float a, int32_t head)
{
    const float x = a + op->dt_bias[head];
    return QS_NAME(exp)(op->rate[head] * (x > 20.0f ? x : log1pf(QS_NAME(exp)(x))));
}

static inline float QS_NAME(sigmoid)(float x)
{
    return 1.0f / (1.0f + QS_NAME(exp)(-x));
}

/* A head of a sequence's `tokens`, the first of which is at x and out; `state` is that of the head. */
static void QS_NAME(delta)(const qs_gated_delta *op, const float *x, float *out, float *state, int32_t tokens,
                           int32_t begins, int32_t head)
{
    const int32_t key_dim = op->key_dim, dim = op->value_dim;
    if (begins)
        memset(state, 0, sizeof(float) * (size_t)key_dim * (size_t)dim);
    for (int32_t t = 0; t < tokens; t++) {
        const QS_NAME(delta_inputs) in = QS_NAME(delta_inputs_of)(op, x + t * qs_delta_width(op), head);
        const float decay = QS_NAME(decay)(op, *in.a, head), beta = QS_NAME(sigmoid)(*in.b);
        float *y = out + (int64_t)t * op->out_stride + head * dim, queries = 0.0f, keys = 0.0f;
        for (int32_t i = 0; i < key_dim; i++) {
            queries += in.q[i] * in.q[i];
            keys += in.k[i] * in.k[i];
        }
        queries = 1.0f / (sqrtf(queries + 1e-6f) * sqrtf((float)key_dim));
        keys = 1.0f / sqrtf(keys + 1e-6f);
        for (int32_t first = 0; first < dim; first += QS_LANES) {
            const int32_t some = dim - first < QS_LANES ? dim - first : QS_LANES;
            float known[QS_LANES] = {0}, sums[QS_LANES] = {0};
            for (int32_t i = 0; i < key_dim; i++)
                for (int32_t j = 0; j < some; j++)
                    known[j] += state[(int64_t)i * dim + first + j] * (in.k[i] * keys);
            for (int32_t j = 0; j < some; j++)
                known[j] = beta * (in.v[first + j] - decay * known[j]);
            for (int32_t i = 0; i < key_dim; i++)
                for (int32_t j = 0; j < some; j++) {
                    float *s = state + (int64_t)i * dim + first + j;
                    *s = *s * decay + in.k[i] * keys * known[j];
                    sums[j] += *s * (in.q[i] * queries);
                }
            memcpy(y + first, sums, sizeof(float) * (size_t)some);
        }
        QS_NAME(rmsnorm)(y, op->norm, y, dim, op->eps);
        QS_NAME(activate)(in.z, y, y, dim, QS_SILU);
    }
}
