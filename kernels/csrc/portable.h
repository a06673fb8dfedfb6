/* Every kernel in portable C. Included once per ISA, with QS_NAME giving each copy its own names, so that the
 * compiler vectorizes the same text for each. It is also the reference that the hand-written kernels are tested
 * against. Contraction to FMA is off (see pyproject.toml), so a row's bits do not depend on how loops were cut. */

#include <string.h>

#include "internal.h"

/* exp by the range reduction x = n ln 2 + r and a degree-6 polynomial (Cephes' minimax coefficients). For x in -87 .. 88
 * this is (exp(r) - 1) and n. */
static inline float QS_NAME(reduced_exp)(float x, float *n)
{
    *n = floorf(x * 1.44269504088896341f + 0.5f);
    float r = x - *n * 0.693359375f;
    r = r - *n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r;
}

static inline float QS_NAME(power)(float n)
{
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return power.f;
}

/* 2 ulp over [-87, 88], below that 0, and exp(0) = 1 exactly. */
static inline float QS_NAME(exp)(float x)
{
    float n, clamped = x > -87.0f ? (x < 88.0f ? x : 88.0f) : -87.0f; /* also for NaN, which no integer can hold */
    float y = (QS_NAME(reduced_exp)(clamped, &n) + 1.0f) * QS_NAME(power)(n);
    return x < -87.0f ? 0.0f : (x == x ? y : x);
}

/* 3 ulp. With t = exp(2x) - 1 it is t / (t + 2), which loses no digits near 0; from 10 on it is 1. */
static inline float QS_NAME(tanh)(float x)
{
    float n, clamped = x > -10.0f ? (x < 10.0f ? x : 10.0f) : -10.0f;
    float part = QS_NAME(reduced_exp)(2.0f * clamped, &n), power = QS_NAME(power)(n);
    float t = part * power + (power - 1.0f);
    return x == x ? t / (t + 2.0f) : x;
}

static inline float QS_NAME(inverse_rms)(const float *x, int32_t width, float eps)
{
    float sums[QS_LANES] = {0};
    int32_t j = 0;
    for (; j + QS_LANES <= width; j += QS_LANES)
        for (int i = 0; i < QS_LANES; i++)
            sums[i] += x[j + i] * x[j + i];
    float sum = 0;
    for (int i = 0; i < QS_LANES; i++)
        sum += sums[i];
    for (; j < width; j++)
        sum += x[j] * x[j];
    return 1.0f / sqrtf(sum / (float)width + eps);
}

static void QS_NAME(rmsnorm)(const float *x, const float *weight, float *out, int32_t width, float eps)
{
    float inverse = QS_NAME(inverse_rms)(x, width, eps);
    for (int32_t j = 0; j < width; j++)
        out[j] = x[j] * inverse * weight[j];
}

static void QS_NAME(add_rmsnorm)(const float *x, const float *weight, float *out, int32_t width, float eps)
{
    float inverse = QS_NAME(inverse_rms)(x, width, eps);
    for (int32_t j = 0; j < width; j++)
        out[j] += x[j] * inverse * weight[j];
}

static inline float QS_NAME(total)(const float *x, int32_t width, float mean, const int squares)
{
    float sums[QS_LANES] = {0}, sum = 0;
    int32_t j = 0;
    for (; j + QS_LANES <= width; j += QS_LANES)
        for (int i = 0; i < QS_LANES; i++)
            sums[i] += squares ? (x[j + i] - mean) * (x[j + i] - mean) : x[j + i];
    for (int i = 0; i < QS_LANES; i++)
        sum += sums[i];
    for (; j < width; j++)
        sum += squares ? (x[j] - mean) * (x[j] - mean) : x[j];
    return sum;
}

static void QS_NAME(layernorm)(const float *x, const float *weight, const float *bias, float *out, int32_t width, float eps)
{
    float mean = QS_NAME(total)(x, width, 0, 0) / (float)width;
    float inverse = 1.0f / sqrtf(QS_NAME(total)(x, width, mean, 1) / (float)width + eps);
    for (int32_t j = 0; j < width; j++)
        out[j] = (x[j] - mean) * inverse * weight[j] + (bias ? bias[j] : 0.0f);
}

static inline float QS_NAME(silu)(float x)
{
    return x / (1.0f + QS_NAME(exp)(-x));
}

/* x Phi(x) = max(x, 0) - |x| Phi(-|x|), which cancels nothing. Phi(-a) = exp(-a^2 / 2) times a polynomial in
 * t = 1 / (1 + 0.3 a), fitted to 6e-8 over [0, 13]: 8 ulp for x > -2, 70 ulp for x > -13, below that 0. */
static inline float QS_NAME(gelu)(float x)
{
    float a = fabsf(x), t = 1.0f / (1.0f + 0.3f * a);
    float p = 3.83115374e-2f;
    p = p * t + -1.68841228e-1f;
    p = p * t + 2.27987975e-1f;
    p = p * t + -7.57365376e-2f;
    p = p * t + 1.42002761e-1f;
    p = p * t + 9.49109346e-2f;
    p = p * t + 1.21862017e-1f;
    p = p * t + 1.19495891e-1f;
    p = p * t + 6.68613120e-6f;
    return (x < 0.0f ? 0.0f : x) - a * (QS_NAME(exp)(-0.5f * a * a) * p);
}

/* 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): 6 ulp for x > -2, 50 ulp for x > -6. */
static inline float QS_NAME(gelu_tanh)(float x)
{
    return x / (1.0f + QS_NAME(exp)(-x * (1.59576912f + 0.0713548163f * x * x)));
}

static inline float QS_NAME(clamp)(float x, float low, float high)
{
    return x < low ? low : (x > high ? high : x);
}

static inline float QS_NAME(swigluoai)(float x)
{
    float y = x > 7.0f ? 7.0f : x;
    return y / (1.0f + QS_NAME(exp)(-1.702f * y));
}

static inline __attribute__((always_inline)) float QS_NAME(activated)(float x, const int32_t function)
{
    float positive = x < 0.0f ? 0.0f : x; /* and NaN */
    switch (function) {
    case QS_SILU: return QS_NAME(silu)(x);
    case QS_GELU: return QS_NAME(gelu)(x);
    case QS_GELU_TANH: return QS_NAME(gelu_tanh)(x);
    case QS_RELU: return positive;
    case QS_RELU2: return positive * positive;
    case QS_SWIGLUOAI: return QS_NAME(swigluoai)(x);
    }
    return x;
}

static inline __attribute__((always_inline)) float QS_NAME(gated)(float gate, float factor, const int32_t function)
{
    if (function == QS_SWIGLUOAI)
        factor = QS_NAME(clamp)(factor, -7.0f, 7.0f) + 1.0f;
    return QS_NAME(activated)(gate, function) * factor;
}

/* out = function(x), with its factor unless that is NULL. */
static void QS_NAME(activate)(const float *x, const float *factor, float *out, int32_t width, int32_t function)
{
#define QS_ACTIVATE(known)                                                                                        \
    case known:                                                                                                   \
        for (int32_t j = 0; j < width; j++)                                                                       \
            out[j] = factor ? QS_NAME(gated)(x[j], factor[j], known) : QS_NAME(activated)(x[j], known);           \
        break;
    switch (function) {
        QS_ACTIVATE(QS_SILU)
        QS_ACTIVATE(QS_GELU)
        QS_ACTIVATE(QS_GELU_TANH)
        QS_ACTIVATE(QS_RELU)
        QS_ACTIVATE(QS_RELU2)
        QS_ACTIVATE(QS_SWIGLUOAI)
    }
#undef QS_ACTIVATE
}

static inline float QS_NAME(capped)(float x, float cap)
{
    return cap * QS_NAME(tanh)(x / cap);
}

static void QS_NAME(soft_cap)(float *x, int32_t width, float cap)
{
    for (int32_t j = 0; j < width; j++)
        x[j] = QS_NAME(capped)(x[j], cap);
}

static void QS_NAME(log_softmax)(float *x, int32_t width)
{
    float top = x[0];
    double sum = 0;
    for (int32_t j = 1; j < width; j++)
        top = x[j] > top ? x[j] : top;
    float parts[QS_LANES] = {0};
    int32_t whole = width - width % QS_LANES;
    for (int32_t j = 0; j < whole; j += QS_LANES)
        for (int i = 0; i < QS_LANES; i++)
            parts[i] += QS_NAME(exp)(x[j + i] - top);
    for (int i = 0; i < QS_LANES; i++)
        sum += parts[i];
    for (int32_t j = whole; j < width; j++)
        sum += QS_NAME(exp)(x[j] - top);
    float shift = top + (float)log(sum);
    for (int32_t j = 0; j < width; j++)
        x[j] -= shift;
}

static int32_t QS_NAME(argmax)(const float *x, int32_t width)
{
    /* Two passes, which the compiler vectorizes; it does not vectorize one pass that keeps the index. */
    float tops[QS_LANES];
    int32_t bad = 0, whole = width - width % QS_LANES;
    for (int i = 0; i < QS_LANES; i++)
        tops[i] = x[0];
    for (int32_t j = 0; j < whole; j += QS_LANES)
        for (int i = 0; i < QS_LANES; i++) {
            tops[i] = x[j + i] > tops[i] ? x[j + i] : tops[i];
            bad |= x[j + i] != x[j + i];
        }
    float top = tops[0];
    for (int i = 1; i < QS_LANES; i++)
        top = tops[i] > top ? tops[i] : top;
    for (int32_t j = whole; j < width; j++) {
        top = x[j] > top ? x[j] : top;
        bad |= x[j] != x[j];
    }
    if (bad)
        return -1;
    int32_t best = 0;
    while (x[best] != top)
        best++;
    return best;
}

/* The bits of |x| compare like |x|, and NaN is above infinity: a maximum of them never loses a NaN. */
static inline uint32_t QS_NAME(magnitude)(float x)
{
    union { float f; uint32_t u; } v = {x};
    return v.u & 0x7fffffffu;
}

/* The distance of e2m1's numbers at a magnitude of at most 6. */
static inline float QS_NAME(e2m1_unit)(float size)
{
    return size < 2 ? 0.5f : size < 4 ? 1.0f : 2.0f;
}

/* Twice the nearest of e2m1's numbers. */
static inline int32_t QS_NAME(twice_e2m1)(float x)
{
    float size = x < 0 ? -x : x;
    size = size < 6 ? size : 6;
    float unit = QS_NAME(e2m1_unit)(size);
    int32_t twice = (int32_t)(rintf(size / unit) * unit * 2);
    return x < 0 ? -twice : twice;
}

/* The scale of a span whose largest magnitude is `top`, and 1 / scale; a NaN scale where `top` is not finite. */
static inline float QS_NAME(span_scale)(const qs_linear *op, uint32_t top, float *inverse)
{
    union { uint32_t u; float f; } absmax = {top};
    float limit = op->act_dtype == QS_F8 ? 448.0f : 127.0f, scale = op->input_scale;
    *inverse = 0.0f;
    if (top >= 0x7f800000u)
        return NAN;
    if (op->act_dtype == QS_F4) {
        float number = absmax.f / (6.0f * op->input_scale);
        scale = qs_round_e4m3(number > 448.0f ? 448.0f : number) * op->input_scale;
        if (scale > 0.0f)
            *inverse = 1.0f / scale;
    } else if (scale > 0.0f)
        *inverse = 1.0f / scale;
    else {
        scale = absmax.f / limit;
        if (absmax.f >= 1e-30f)
            *inverse = limit / absmax.f;
    }
    return scale;
}

/* `direct`: the inputs are the columns of x in order, so that the loops can be vectorized. `fp4`: codes are twice e2m1's
 * numbers. */
static inline __attribute__((always_inline)) void QS_NAME(quantize_columns)(
    const qs_linear *op, const float *x, const qs_acts *acts, int64_t row, const int direct, const int fp4)
{
#define QS_INPUT(j) (direct ? x[j] : (column = op->permutation ? op->permutation[j] : (j)) < 0 || \
                     column >= op->x_width ? 0.0f : x[column])
    int32_t column;
    int64_t at = row;
    for (int32_t start = 0; start < op->k; start += op->act_span) {
        int32_t end = op->k - start < op->act_span ? op->k : start + op->act_span;
        uint32_t top = 0;
        float inverse;
        for (int32_t j = start; j < end; j++) {
            uint32_t magnitude = QS_NAME(magnitude)(QS_INPUT(j));
            top = magnitude > top ? magnitude : top;
        }
        float scale = QS_NAME(span_scale)(op, top, &inverse);
        for (int32_t part = start; part < end; part += op->act_group, at += acts->rows) {
            int8_t *codes = acts->codes + at * op->act_group;
            int32_t sum = 0, size = 0;
            for (int32_t j = part; j < part + op->act_group; j++) {
                float scaled = inverse == 0.0f ? 0.0f : QS_INPUT(j) * inverse;
                int32_t code = fp4 ? QS_NAME(twice_e2m1)(scaled)
                                   : (int32_t)rintf(QS_NAME(clamp)(scaled, -128.0f, 127.0f));
                *codes++ = (int8_t)code;
                sum += code;
                size += code < 0 ? -code : code;
            }
            acts->scales[at] = fp4 ? 0.5f * scale : scale;
            acts->sums[at] = sum;
            acts->reach[at] = (size + (sum < 0 ? -sum : sum)) / 2; /* over all pairs */
        }
    }
#undef QS_INPUT
}

static void QS_NAME(quantize)(const qs_linear *op, const float *x, const qs_acts *acts, int64_t row)
{
    const int direct = !op->permutation && op->x_width == op->k;
    if (op->act_dtype == QS_F4)
        QS_NAME(quantize_columns)(op, x, acts, row, 0, 1);
    else if (direct)
        QS_NAME(quantize_columns)(op, x, acts, row, 1, 0);
    else
        QS_NAME(quantize_columns)(op, x, acts, row, 0, 0);
}

static void QS_NAME(round_input)(const qs_linear *op, const float *x, float *rounded)
{
    for (int32_t start = 0; start < op->k; start += op->act_span) {
        int32_t end = op->k - start < op->act_span ? op->k : start + op->act_span;
        uint32_t top = 0;
        float inverse;
        for (int32_t j = start; j < end; j++) {
            uint32_t magnitude = QS_NAME(magnitude)(x[j]);
            top = magnitude > top ? magnitude : top;
        }
        float scale = QS_NAME(span_scale)(op, top, &inverse);
        if (op->act_dtype == QS_F8)
            for (int32_t j = start; j < end; j++)
                rounded[j] = qs_round_e4m3(QS_NAME(clamp)(x[j] * inverse, -448.0f, 448.0f)) * scale;
        else
            for (int32_t j = start; j < end; j++)
                rounded[j] = rintf(QS_NAME(clamp)(x[j] * inverse, -128.0f, 127.0f)) * scale;
    }
}

static inline void QS_NAME(store_tile)(const qs_linear *op, const float *sums, int32_t row, int32_t tile)
{
    int32_t start = tile * QS_LANES;
    int32_t lanes = op->n - start < QS_LANES ? op->n - start : QS_LANES;
    float *out = op->out + (int64_t)row * op->out_stride + (op->gated ? tile / 2 * QS_LANES : start);
    for (int i = 0; i < lanes; i++) {
        float value = sums[i] + (op->bias ? op->bias[start + i] : 0.0f);
        if (!op->gated)
            value = QS_NAME(activated)(value, op->function);
        else if (tile % 2) /* the gate is kept where its product will go */
            value = QS_NAME(gated)(out[i], value, op->function);
        if (op->cap != 0.0f)
            value = QS_NAME(capped)(value, op->cap);
        out[i] = op->accumulate ? out[i] + value : value;
    }
}

/* One of `scales` or zeros. */
static inline float QS_NAME(scale)(const qs_linear *op, const void *scales, int64_t at)
{
    if (op->scale_dtype == QS_F8)
        return qs_half_to_float((uint16_t)(((const uint8_t *)scales)[at] << 7));
    return op->scale_dtype == QS_F16 ? qs_half_to_float(((const uint16_t *)scales)[at]) : ((const float *)scales)[at];
}

static void QS_NAME(linear_int)(const qs_linear *op, const qs_acts *acts, int32_t first, int32_t end,
                                int32_t tile, int32_t tiles, uint8_t *unpacked)
{
    int32_t parts = op->k / op->act_group, groups = op->k / op->group, planes = op->codebook ? op->codebook_bytes : 1;
    for (int32_t t = tile; t < tile + tiles; t++) {
        const uint8_t *codes = (const uint8_t *)op->weight + (int64_t)t * op->k * QS_LANES;
        if (op->dtype == QS_U4) {
            const uint8_t *packed = (const uint8_t *)op->weight + (int64_t)t * op->k * QS_LANES / 2;
            for (int32_t j = 0; j < op->k / 8; j++)
                for (int i = 0; i < 64; i++) {
                    unpacked[j * 128 + i] = packed[j * 64 + i] & 15;
                    unpacked[j * 128 + 64 + i] = packed[j * 64 + i] >> 4;
                }
            for (int32_t byte = planes; op->codebook && byte-- > 0;)
                for (int32_t j = 0; j < op->k * QS_LANES; j++)
                    unpacked[byte * op->k * QS_LANES + j] = op->codebook[16 * byte + unpacked[j]];
            codes = unpacked;
        }
        for (int32_t row = first; row < end; row++) {
            float sums[QS_LANES] = {0};
            for (int32_t p = 0; p < parts; p++) {
                int32_t dot[QS_LANES] = {0};
                int64_t at = p * acts->rows + row;
                int64_t scale_at = ((int64_t)t * groups + p * op->act_group / op->group) * QS_LANES;
                const int8_t *x = acts->codes + at * op->act_group;
                for (int32_t byte = planes; byte-- > 0;) {
                    const uint8_t *w = codes + ((int64_t)byte * op->k + p * op->act_group) * QS_LANES;
                    for (int i = 0; i < QS_LANES; i++)
                        dot[i] *= 256;
                    for (int32_t j = 0; j < op->act_group; j += 4, w += 64)
                        for (int i = 0; i < QS_LANES; i++)
                            dot[i] += w[4 * i] * x[j] + w[4 * i + 1] * x[j + 1] + w[4 * i + 2] * x[j + 2] +
                                      w[4 * i + 3] * x[j + 3];
                }
                for (int i = 0; i < QS_LANES; i++) {
                    float product = (float)(dot[i] - op->zero * acts->sums[at]);
                    if (op->zeros)
                        product -= QS_NAME(scale)(op, op->zeros, scale_at + i) * (float)acts->sums[at];
                    sums[i] += product * QS_NAME(scale)(op, op->scales, scale_at + i) * acts->scales[at];
                }
            }
            for (int i = 0; i < QS_LANES && op->row_scales; i++)
                sums[i] *= op->row_scales[t * QS_LANES + i];
            QS_NAME(store_tile)(op, sums, row, t);
        }
    }
}

/* One tile of e4m3 as f32 [k][16], scaled. */
static void QS_NAME(unpack_f8)(const qs_linear *op, int32_t tile, float *unpacked)
{
    const uint8_t *codes = (const uint8_t *)op->weight + (int64_t)tile * op->k * QS_LANES;
    const float *scales = (const float *)op->scales + (int64_t)tile * ((op->k + op->group - 1) / op->group) * QS_LANES;
    for (int32_t k = 0; k < op->k; k++)
        for (int i = 0; i < QS_LANES; i++)
            unpacked[k * QS_LANES + i] =
                qs_e4m3_to_float(codes[k * QS_LANES + i]) * scales[k / op->group * QS_LANES + i];
}

static void QS_NAME(linear_float)(const qs_linear *op, const float *input, int32_t first, int32_t end,
                                  int32_t tile, int32_t tiles, float *unpacked)
{
    for (int32_t t = tile; t < tile + tiles; t++) {
        int64_t start = (int64_t)t * op->k * QS_LANES;
        const float *tile32 = (const float *)op->weight + start;
        if (op->dtype == QS_F8) {
            QS_NAME(unpack_f8)(op, t, unpacked);
            tile32 = unpacked;
        }
        for (int32_t row = first; row < end; row++) {
            float sums[QS_LANES] = {0};
            const float *x = input + (int64_t)row * op->x_stride;
            for (int32_t k = 0; k < op->k; k++) {
                const uint16_t *w16 = (const uint16_t *)op->weight + start + (int64_t)k * QS_LANES;
                const float *w32 = tile32 + (int64_t)k * QS_LANES;
                if (op->dtype == QS_BF16)
                    for (int i = 0; i < QS_LANES; i++)
                        sums[i] += x[k] * qs_bf16_to_float(w16[i]);
                else if (op->dtype == QS_F16)
                    for (int i = 0; i < QS_LANES; i++)
                        sums[i] += x[k] * qs_half_to_float(w16[i]);
                else
                    for (int i = 0; i < QS_LANES; i++)
                        sums[i] += x[k] * w32[i];
            }
            QS_NAME(store_tile)(op, sums, row, t);
        }
    }
}

#include "kv_cache.h"

/* out, which may be x, is x [2 * half] rotated. */
static inline void QS_NAME(turn)(const float *x, float *out, const float *cosine, const float *sine, int32_t half)
{
    for (int32_t j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        out[j] = a * cosine[j] - b * sine[j];
        out[j + half] = b * cosine[j] + a * sine[j];
    }
}

/* Rotates a head in place, normed first where `norm` is that of one head. */
static inline void QS_NAME(rotate)(const qs_rope_kv *op, float *x, const float *norm, int32_t position)
{
    int32_t half = op->rotary_dim / 2;
    if (norm && !op->norm_over_heads)
        QS_NAME(rmsnorm)(x, norm, x, op->head_dim, op->eps);
    QS_NAME(turn)(x, x, op->cosine + (int64_t)position * half, op->sine + (int64_t)position * half, half);
}

/* Rotates the query heads of a key head, and its key, and subtracts from the key what all keys have in common. Behind it,
 * where the cache asks for it, these and the value are turned by a Hadamard matrix. Returns the key. */
static inline float *QS_NAME(rotate_heads)(const qs_rope_kv *op, float *row, int32_t position, int32_t kv_head)
{
    int32_t group = op->heads / op->kv_heads, dim = op->head_dim;
    for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        float *q = row + (int64_t)head * dim;
        QS_NAME(rotate)(op, q, op->q_norm, position);
        for (int32_t j = 0; op->q_scale && j < dim; j++)
            q[j] *= op->q_scale[position];
        if (op->kv_dtype == QS_U4)
            QS_NAME(hadamard)(q, dim);
    }
    float *k = row + (int64_t)(op->heads + kv_head) * dim;
    QS_NAME(rotate)(op, k, op->k_norm, position);
    for (int32_t j = 0; op->k_center && j < dim; j++)
        k[j] -= op->k_center[(int64_t)kv_head * dim + j];
    if (op->kv_dtype == QS_U4) {
        QS_NAME(hadamard)(k, dim);
        QS_NAME(hadamard)(k + (int64_t)op->kv_heads * dim, dim);
    }
    return k;
}

static void QS_NAME(rope_kv)(const qs_rope_kv *op, float *row, int32_t position, int32_t slot, int32_t kv_head)
{
    const float *k = QS_NAME(rotate_heads)(op, row, position, kv_head);
    QS_NAME(store_kv)(op, k, k + (int64_t)op->kv_heads * op->head_dim, slot, kv_head);
}

static void QS_NAME(latent_kv)(const qs_latent_kv *op, float *kv, const float *q, float *out, int32_t position, int32_t slot)
{
    const int32_t half = op->rope / 2, width = op->rank + op->rope;
    const float *cosine = op->cosine + (int64_t)position * half, *sine = op->sine + (int64_t)position * half;
    const int64_t at = (int64_t)slot * width;
    uint16_t *halves = (uint16_t *)op->cache + at;
    QS_NAME(rmsnorm)(kv, op->norm, kv, op->rank, op->eps);
    QS_NAME(turn)(kv + op->rank, kv + op->rank, cosine, sine, half);
    for (int32_t h = 0; h < op->heads; h++)
        QS_NAME(turn)(q + (int64_t)h * op->q_head, out + (int64_t)h * op->out_head, cosine, sine, half);
    if (op->kv_dtype == QS_F32)
        memcpy((float *)op->cache + at, kv, sizeof(float) * (size_t)width);
    else
        for (int32_t j = 0; j < width; j++)
            halves[j] = op->kv_dtype == QS_F16 ? qs_float_to_half(kv[j]) : qs_float_to_bf16(kv[j]);
}

static inline __attribute__((always_inline)) void QS_NAME(attend_as)(
    const qs_attention *op, const qs_queries *queries, int32_t kv_head, const int dtype)
{
    int32_t dim = op->head_dim;
    float k_scale = op->k_scale ? op->scale * op->k_scale[kv_head] : op->scale;
    float v_scale = op->v_scale ? op->v_scale[kv_head] : 1.0f;
    for (int32_t r = 0; r < queries->count; r++) {
        float sum[256] = {0}, top = queries->top[r], total = queries->total[r];
        for (int32_t block = queries->first[r] / QS_LANES; block <= queries->last[r] / QS_LANES; block++) {
            float scores[QS_LANES] = {0}, best = top;
            int64_t base = ((int64_t)queries->tables[r][block] * op->kv_heads + kv_head) * qs_kv_bytes(dtype, dim);
            const char *keys = (const char *)op->k_cache + base, *values = (const char *)op->v_cache + base;
            int32_t begin = queries->first[r] - block * QS_LANES, end = queries->last[r] - block * QS_LANES;
            begin = begin < 0 ? 0 : begin;
            end = end > QS_LANES - 1 ? QS_LANES - 1 : end;
            for (int32_t j = 0; j < dim; j++)
                for (int i = 0; i < QS_LANES; i++)
                    scores[i] += queries->q[r][j] * QS_NAME(cached_key)(keys, dim, i, j, dtype);
            for (int32_t i = begin; i <= end; i++) {
                scores[i] *= k_scale;
                if (op->softcap != 0.0f)
                    scores[i] = QS_NAME(capped)(scores[i], op->softcap);
                best = scores[i] > best || scores[i] != scores[i] ? scores[i] : best;
            }
            float shrink = QS_NAME(exp)(top - best);
            top = best;
            total *= shrink;
            for (int32_t j = 0; j < dim; j++)
                sum[j] *= shrink;
            for (int32_t i = begin; i <= end; i++) {
                float weight = QS_NAME(exp)(scores[i] - top);
                total += weight;
                for (int32_t j = 0; j < dim; j++)
                    sum[j] += weight * QS_NAME(cached_value)(values, dim, i, j, dtype);
            }
        }
        for (int32_t j = 0; j < dim; j++)
            queries->out[r][j] = sum[j] / total * v_scale;
        if (dtype == QS_U4)
            QS_NAME(inverse_hadamard)(queries->out[r], dim);
    }
}

static void QS_NAME(attend)(const qs_attention *op, const qs_queries *queries, int32_t kv_head)
{
    switch (op->kv_dtype) {
    case QS_F32: QS_NAME(attend_as)(op, queries, kv_head, QS_F32); break;
    case QS_F16: QS_NAME(attend_as)(op, queries, kv_head, QS_F16); break;
    case QS_BF16: QS_NAME(attend_as)(op, queries, kv_head, QS_BF16); break;
    case QS_F8: QS_NAME(attend_as)(op, queries, kv_head, QS_F8); break;
    case QS_I8: QS_NAME(attend_as)(op, queries, kv_head, QS_I8); break;
    case QS_U4: QS_NAME(attend_as)(op, queries, kv_head, QS_U4); break;
    }
}

#include "rounding.h"
#include "trellis.h"
#include "routing.h"
#include "row_sampling.h"
#include "delta.h"
