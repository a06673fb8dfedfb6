/* How keys and values lie in the blocks of the cache, behind the text of portable.h. */

static inline int8_t QS_NAME(kv_code)(float x)
{
    int32_t finite = QS_NAME(magnitude)(x) < 0x7f800000u;
    int32_t code = (int32_t)rintf(finite ? QS_NAME(clamp)(x, -127.0f, 127.0f) : 0.0f);
    return (int8_t)(finite ? code : -128);
}

/* x times the Hadamard matrix of as many numbers as the greatest power of two that divides `dim`, part by part. The
 * matrix is scaled to be its own inverse. */
static inline void QS_NAME(butterflies)(float *x, int32_t dim)
{
    const int32_t part = dim & -dim;
    for (int32_t step = 1; step < part; step *= 2)
        for (int32_t first = 0; first < dim; first += 2 * step)
            for (int32_t j = first; j < first + step; j++) {
                float a = x[j], b = x[j + step];
                x[j] = a + b;
                x[j + step] = a - b;
            }
    const float scale = 1.0f / sqrtf((float)part);
    for (int32_t j = 0; j < dim; j++)
        x[j] *= scale;
}

/* Of Rudin and Shapiro: their own transform is flat, so what all channels share comes into no single one. */
static inline void QS_NAME(change_signs)(float *x, int32_t dim)
{
    for (int32_t j = 0; j < dim; j++)
        x[j] = __builtin_popcount((uint32_t)(j & j >> 1)) & 1 ? -x[j] : x[j];
}

/* Spreads what is large in a few channels over the head. */
static inline void QS_NAME(hadamard)(float *x, int32_t dim)
{
    QS_NAME(change_signs)(x, dim);
    QS_NAME(butterflies)(x, dim);
}

static inline void QS_NAME(inverse_hadamard)(float *x, int32_t dim)
{
    QS_NAME(butterflies)(x, dim);
    QS_NAME(change_signs)(x, dim);
}

/* Writes the key or the value x of a token into `block` of a 4-bit cache. Element j of its first half goes into the lower
 * half of the byte at first + j * stride, element j of its second half above it. */
static void QS_NAME(store_u4)(const float *x, uint8_t *block, int64_t first, int32_t stride, int32_t token, int32_t dim)
{
    uint16_t *steps = (uint16_t *)(void *)(block + (int64_t)dim / 2 * QS_LANES), *lows = steps + QS_LANES;
    float least = x[0], most = x[0];
    uint32_t size = 0;
    for (int32_t j = 0; j < dim; j++) {
        least = x[j] < least ? x[j] : least;
        most = x[j] > most ? x[j] : most;
        size = QS_NAME(magnitude)(x[j]) > size ? QS_NAME(magnitude)(x[j]) : size;
    }
    steps[token] = qs_float_to_half((most - least) / 15.0f);
    lows[token] = qs_float_to_half(least);
    if (size >= 0x7f800000u || (steps[token] & 0x7c00) == 0x7c00 || (lows[token] & 0x7c00) == 0x7c00)
        steps[token] = lows[token] = 0x7e00; /* NaN */
    const float step = qs_half_to_float(steps[token]), low = qs_half_to_float(lows[token]);
    for (int32_t j = 0; j < dim / 2; j++) {
        uint8_t codes[2];
        for (int i = 0; i < 2; i++) {
            float scaled = step > 0.0f ? (x[j + i * dim / 2] - low) / step : 0.0f;
            codes[i] = (uint8_t)rintf(QS_NAME(clamp)(scaled, 0.0f, 15.0f));
        }
        block[first + (int64_t)j * stride] = (uint8_t)(codes[0] | codes[1] << 4);
    }
}

/* Writes the key k and the value v of a head to their slot. */
static void QS_NAME(store_kv)(const qs_rope_kv *op, const float *k, const float *v, int32_t slot, int32_t head)
{
    int64_t block = slot / QS_LANES, offset = slot % QS_LANES, dim = op->head_dim;
    int64_t base = (block * op->kv_heads + head) * qs_kv_bytes(op->kv_dtype, op->head_dim);
    char *keys = (char *)op->k_cache + base, *values = (char *)op->v_cache + base;
    if (op->kv_dtype == QS_U4) {
        QS_NAME(store_u4)(k, (uint8_t *)keys, offset, QS_LANES, (int32_t)offset, op->head_dim);
        QS_NAME(store_u4)(v, (uint8_t *)values, offset * dim / 2, 1, (int32_t)offset, op->head_dim);
        return;
    }
    for (int64_t j = 0, key = offset, value = offset * dim; j < dim; j++, key += QS_LANES, value++)
        switch (op->kv_dtype) {
        case QS_F32:
            ((float *)(void *)keys)[key] = k[j];
            ((float *)(void *)values)[value] = v[j];
            break;
        case QS_F16:
            ((uint16_t *)(void *)keys)[key] = qs_float_to_half(k[j]);
            ((uint16_t *)(void *)values)[value] = qs_float_to_half(v[j]);
            break;
        case QS_BF16:
            ((uint16_t *)(void *)keys)[key] = qs_float_to_bf16(k[j]);
            ((uint16_t *)(void *)values)[value] = qs_float_to_bf16(v[j]);
            break;
        case QS_I8:
            ((int8_t *)keys)[key] = QS_NAME(kv_code)(k[j] / op->k_scale[head]);
            ((int8_t *)values)[value] = QS_NAME(kv_code)(v[j] / op->v_scale[head]);
            break;
        case QS_F8:
            ((uint8_t *)keys)[key] = qs_float_to_e4m3(k[j] / op->k_scale[head]);
            ((uint8_t *)values)[value] = qs_float_to_e4m3(v[j] / op->v_scale[head]);
            break;
        }
}

/* The number at `at`, before a scale that is the same for the whole head. */
static inline float QS_NAME(cached)(const void *block, int64_t at, const int dtype)
{
    if (dtype == QS_F32)
        return ((const float *)block)[at];
    if (dtype == QS_F16)
        return qs_half_to_float(((const uint16_t *)block)[at]);
    if (dtype == QS_BF16)
        return qs_bf16_to_float(((const uint16_t *)block)[at]);
    if (dtype == QS_F8)
        return qs_e4m3_to_float(((const uint8_t *)block)[at]);
    int8_t code = ((const int8_t *)block)[at];
    return code == -128 ? NAN : (float)code;
}

static inline float QS_NAME(cached_u4)(const void *block, int64_t at, int32_t upper, int32_t dim, int32_t token)
{
    const uint8_t *codes = block;
    const uint16_t *steps = (const uint16_t *)(const void *)(codes + (int64_t)dim / 2 * QS_LANES);
    float code = (float)(upper ? codes[at] >> 4 : codes[at] & 15);
    return qs_half_to_float(steps[token]) * code + qs_half_to_float(steps[QS_LANES + token]);
}

static inline float QS_NAME(cached_key)(const void *block, int32_t dim, int32_t token, int32_t j, const int dtype)
{
    if (dtype == QS_U4)
        return QS_NAME(cached_u4)(block, (int64_t)(j % (dim / 2)) * QS_LANES + token, j >= dim / 2, dim, token);
    return QS_NAME(cached)(block, (int64_t)j * QS_LANES + token, dtype);
}

static inline float QS_NAME(cached_value)(const void *block, int32_t dim, int32_t token, int32_t j, const int dtype)
{
    if (dtype == QS_U4)
        return QS_NAME(cached_u4)(block, (int64_t)token * (dim / 2) + j % (dim / 2), j >= dim / 2, dim, token);
    return QS_NAME(cached)(block, (int64_t)token * dim + j, dtype);
}
