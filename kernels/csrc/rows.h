/* Row-wise computations over vectors: norms, activations, softmax, the rounding of inputs, rotation. Included behind
 * portable.h by an ISA that has defined INLINE, UNROLL and these:
 *
 *   vf, vi, LANES, PARTS      vectors of LANES floats and integers; PARTS of them are QS_LANES numbers
 *   load, store, stream       stream goes past the caches where there is a way
 *   all                       one number in every lane
 *   fused(a, b, c)            a * b + c, rounded once
 *   higher(a, b), lower(a, b) NaN where b is; where a is, b or NaN
 *   nearest, times_power      to an integer, half to even; x * 2^n for such an n in -126 .. 127
 *   unless_below(x, y, low)   x, and 0 where y < low
 *   nan_where(x, y, value)    x, and NaN where y == value
 *   above(a, b), equal(a, b)  a bit for each lane where a > b, where a == b
 *   chosen(bits, a, b)        a where the bit of a lane is set, else b
 *   highest, sum              of the lanes
 *   magnitudes(top, x)        the higher of `top` and |x| as integers, so that no NaN is lost; highest_bits: of the lanes
 *   codes_of, store_codes     numbers in -128 .. 127 to integers, half to even, and those to bytes; sum_codes: of the lanes
 *   load_unsigned, floats_of  bytes to integers, and integers to numbers
 *   load_halves, store_halves, load_bf16, load_bytes (signed), load_e4m3 (a 256th of it, NaN not told apart)
 *
 * + - * / are the operators of C. */

INLINE vf load_floats(const void *values, int64_t at, const int dtype)
{
    if (dtype == QS_F32)
        return load((const float *)values + at);
    if (dtype == QS_F16)
        return load_halves((const uint16_t *)values + at);
    return load_bf16((const uint16_t *)values + at);
}

/* The part-th vector of the scales of a tile, or of its zero points. */
INLINE vf load_scales(const uint8_t *scales, int part, int32_t dtype)
{
    if (dtype == QS_F8)
        return load_f8(scales + LANES * part);
    if (dtype == QS_F16)
        return load_halves((const uint16_t *)(const void *)scales + LANES * part);
    return load((const float *)(const void *)scales + LANES * part);
}

/* The functions of portable.h with fused products, and no larger errors. x in -87 .. 88 is n ln 2 + r, and exp(r) is
 * 1 + r + p r^2. */
INLINE vf reduced(vf x, vf *n, vf *r)
{
    *n = nearest(x * all(1.44269504088896341f));
    *r = fused(*n, all(2.12194440e-4f), fused(*n, all(-0.693359375f), x));
    vf p = all(1.9875691500e-4f);
    p = fused(p, *r, all(1.3981999507e-3f));
    p = fused(p, *r, all(8.3334519073e-3f));
    p = fused(p, *r, all(4.1665795894e-2f));
    p = fused(p, *r, all(1.6666665459e-1f));
    return fused(p, *r, all(5.0000001201e-1f));
}

INLINE vf exp_lanes(vf x)
{
    vf n, r, p = reduced(lower(all(88.0f), higher(all(-87.0f), x)), &n, &r);
    return unless_below(times_power(fused(p * r, r, r + all(1.0f)), n), x, all(-87.0f));
}

INLINE vf tanh_lanes(vf x)
{
    vf n, r, p = reduced(all(2.0f) * lower(all(10.0f), higher(all(-10.0f), x)), &n, &r);
    vf power = times_power(all(1.0f), n), t = fused(fused(p * r, r, r), power, power - all(1.0f));
    return t / (t + all(2.0f));
}

INLINE vf silu(vf x)
{
    return x / (all(1.0f) + exp_lanes(all(0.0f) - x));
}

INLINE vf gelu(vf x)
{
    vf a = higher(all(0.0f) - x, x), t = all(1.0f) / fused(all(0.3f), a, all(1.0f));
    vf p = all(3.83115374e-2f);
    p = fused(p, t, all(-1.68841228e-1f));
    p = fused(p, t, all(2.27987975e-1f));
    p = fused(p, t, all(-7.57365376e-2f));
    p = fused(p, t, all(1.42002761e-1f));
    p = fused(p, t, all(9.49109346e-2f));
    p = fused(p, t, all(1.21862017e-1f));
    p = fused(p, t, all(1.19495891e-1f));
    p = fused(p, t, all(6.68613120e-6f));
    return higher(all(0.0f), x) - a * (exp_lanes(all(-0.5f) * a * a) * p);
}

INLINE vf gelu_tanh(vf x)
{
    vf slope = fused(all(0.0713548163f) * x, x, all(1.59576912f));
    return x / (all(1.0f) + exp_lanes((all(0.0f) - x) * slope));
}

INLINE vf swigluoai(vf x)
{
    vf y = lower(all(7.0f), x);
    return y / (all(1.0f) + exp_lanes(all(-1.702f) * y));
}

INLINE vf activated(vf x, const int32_t function)
{
    vf positive = higher(all(0.0f), x);
    switch (function) {
    case QS_SILU: return silu(x);
    case QS_GELU: return gelu(x);
    case QS_GELU_TANH: return gelu_tanh(x);
    case QS_RELU: return positive;
    case QS_RELU2: return positive * positive;
    case QS_SWIGLUOAI: return swigluoai(x);
    }
    return x;
}

INLINE vf gated(vf gate, vf factor, const int32_t function)
{
    if (function == QS_SWIGLUOAI)
        factor = lower(all(7.0f), higher(all(-7.0f), factor)) + all(1.0f);
    return activated(gate, function) * factor;
}

INLINE vf capped(vf x, float cap)
{
    return all(cap) * tanh_lanes(x / all(cap));
}

/* The sum of QS_LANES numbers. */
INLINE float sum_parts(const vf *x)
{
    vf total = x[0];
    UNROLL for (int p = 1; p < PARTS; p++)
        total = total + x[p];
    return sum(total);
}

INLINE float inverse_rms(const float *x, int32_t width, float eps)
{
    vf squares[PARTS];
    int32_t j = 0;
    UNROLL for (int p = 0; p < PARTS; p++)
        squares[p] = all(0.0f);
    for (; j + QS_LANES <= width; j += QS_LANES)
        UNROLL for (int p = 0; p < PARTS; p++) {
            vf value = load(x + j + p * LANES);
            squares[p] = fused(value, value, squares[p]);
        }
    float total = sum_parts(squares);
    for (; j < width; j++)
        total += x[j] * x[j];
    return 1.0f / sqrtf(total / (float)width + eps);
}

static void rmsnorm(const float *x, const float *weight, float *out, int32_t width, float eps)
{
    const float inverse = inverse_rms(x, width, eps);
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES)
        store(out + j, load(x + j) * all(inverse) * load(weight + j));
    for (; j < width; j++)
        out[j] = x[j] * inverse * weight[j];
}

static void add_rmsnorm(const float *x, const float *weight, float *out, int32_t width, float eps)
{
    const float inverse = inverse_rms(x, width, eps);
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES)
        store(out + j, load(out + j) + load(x + j) * all(inverse) * load(weight + j));
    for (; j < width; j++)
        out[j] += x[j] * inverse * weight[j];
}

/* The sum of x, or of the squares of its distances from `mean`. */
INLINE float total_of(const float *x, int32_t width, float mean, const int squares)
{
    vf sums[PARTS];
    int32_t j = 0;
    UNROLL for (int p = 0; p < PARTS; p++)
        sums[p] = all(0.0f);
    for (; j + QS_LANES <= width; j += QS_LANES)
        UNROLL for (int p = 0; p < PARTS; p++) {
            vf value = load(x + j + p * LANES), apart = value - all(mean);
            sums[p] = squares ? fused(apart, apart, sums[p]) : sums[p] + value;
        }
    float total = sum_parts(sums);
    for (; j < width; j++)
        total += squares ? (x[j] - mean) * (x[j] - mean) : x[j];
    return total;
}

static void layernorm(const float *x, const float *weight, const float *bias, float *out, int32_t width, float eps)
{
    const float mean = total_of(x, width, 0.0f, 0) / (float)width;
    const float inverse = 1.0f / sqrtf(total_of(x, width, mean, 1) / (float)width + eps);
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        vf normed = (load(x + j) - all(mean)) * all(inverse) * load(weight + j);
        store(out + j, bias ? normed + load(bias + j) : normed);
    }
    for (; j < width; j++)
        out[j] = (x[j] - mean) * inverse * weight[j] + (bias ? bias[j] : 0.0f);
}

INLINE int32_t activate_as(const float *x, const float *factor, float *out, int32_t width, const int32_t function)
{
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        vf value = load(x + j);
        store(out + j, factor ? gated(value, load(factor + j), function) : activated(value, function));
    }
    return j;
}

static void activate(const float *x, const float *factor, float *out, int32_t width, int32_t function)
{
    int32_t j = 0;
    switch (function) {
    case QS_SILU: j = activate_as(x, factor, out, width, QS_SILU); break;
    case QS_GELU: j = activate_as(x, factor, out, width, QS_GELU); break;
    case QS_GELU_TANH: j = activate_as(x, factor, out, width, QS_GELU_TANH); break;
    case QS_RELU: j = activate_as(x, factor, out, width, QS_RELU); break;
    case QS_RELU2: j = activate_as(x, factor, out, width, QS_RELU2); break;
    case QS_SWIGLUOAI: j = activate_as(x, factor, out, width, QS_SWIGLUOAI); break;
    }
    QS_NAME(activate)(x + j, factor ? factor + j : NULL, out + j, width - j, function);
}

static void soft_cap(float *x, int32_t width, float cap)
{
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES)
        store(x + j, capped(load(x + j), cap));
    QS_NAME(soft_cap)(x + j, width - j, cap);
}

static void log_softmax(float *x, int32_t width)
{
    vf tops[PARTS], sums[PARTS];
    int32_t j = 0;
    UNROLL for (int p = 0; p < PARTS; p++) {
        tops[p] = all(-INFINITY);
        sums[p] = all(0.0f);
    }
    for (; j + QS_LANES <= width; j += QS_LANES)
        UNROLL for (int p = 0; p < PARTS; p++)
            tops[p] = higher(load(x + j + p * LANES), tops[p]);
    UNROLL for (int p = 1; p < PARTS; p++)
        tops[0] = higher(tops[p], tops[0]);
    float top = highest(tops[0]);
    for (; j < width; j++)
        top = x[j] > top ? x[j] : top;
    for (j = 0; j + QS_LANES <= width; j += QS_LANES)
        UNROLL for (int p = 0; p < PARTS; p++)
            sums[p] = sums[p] + exp_lanes(load(x + j + p * LANES) - all(top));
    double total = sum_parts(sums);
    for (; j < width; j++)
        total += QS_NAME(exp)(x[j] - top);
    float shift = top + (float)log(total);
    for (j = 0; j + LANES <= width; j += LANES)
        store(x + j, load(x + j) - all(shift));
    for (; j < width; j++)
        x[j] -= shift;
}

/* The highest of all, and then where it comes first. */
static int32_t argmax(const float *x, int32_t width)
{
    const int32_t whole = width - width % QS_LANES;
    vf tops[PARTS];
    vi sizes[PARTS];
    UNROLL for (int p = 0; p < PARTS; p++) {
        tops[p] = all(-INFINITY);
        sizes[p] = magnitudes(codes_of(all(0.0f)), all(0.0f));
    }
    for (int32_t j = 0; j < whole; j += QS_LANES)
        UNROLL for (int p = 0; p < PARTS; p++) {
            vf value = load(x + j + p * LANES);
            tops[p] = higher(value, tops[p]);
            sizes[p] = magnitudes(sizes[p], value);
        }
    float top = -INFINITY;
    uint32_t size = 0;
    UNROLL for (int p = 0; p < PARTS; p++) {
        float best = highest(tops[p]);
        uint32_t largest = highest_bits(sizes[p]);
        top = best > top ? best : top;
        size = largest > size ? largest : size;
    }
    for (int32_t j = whole; j < width; j++) {
        top = x[j] > top ? x[j] : top;
        size = QS_NAME(magnitude)(x[j]) > size ? QS_NAME(magnitude)(x[j]) : size;
    }
    if (size > 0x7f800000u)
        return -1;
    int32_t j = 0;
    for (uint32_t found; j + LANES <= width; j += LANES)
        if ((found = equal(load(x + j), all(top))))
            return j + __builtin_ctz(found);
    while (x[j] != top)
        j++;
    return j;
}

/* Twice the nearest of e2m1's numbers, whose distances double at 2 and at 4. */
INLINE vf twice_e2m1(vf x)
{
    x = lower(higher(x, all(-6.0f)), all(6.0f));
    vf size = higher(x, all(0.0f) - x), coarse = all(4.0f) * nearest(all(0.5f) * x);
    vf fine = chosen(above(size, all(2.0f)), all(2.0f) * nearest(x), nearest(all(2.0f) * x));
    return chosen(above(size, all(4.0f)), coarse, fine);
}

INLINE void quantize_lanes(
    const qs_linear *op, const float *x, const qs_acts *acts, int64_t row, const int fp4)
{
    const vi zero = codes_of(all(0.0f));
    int64_t at = row;
    for (int32_t start = 0; start < op->k; start += op->act_span) {
        int32_t end = op->k - start < op->act_span ? op->k : start + op->act_span;
        vi top = zero;
        float inverse;
        for (int32_t j = start; j < end; j += LANES)
            top = magnitudes(top, load(x + j));
        float scale = QS_NAME(span_scale)(op, highest_bits(top), &inverse);
        for (int32_t part = start; part < end; part += op->act_group, at += acts->rows) {
            int8_t *codes = acts->codes + at * op->act_group;
            vi total = zero, size = zero;
            for (int32_t j = 0; j < op->act_group; j += LANES) {
                vf scaled = load(x + part + j) * all(inverse);
                scaled = fp4 ? twice_e2m1(scaled) : lower(higher(scaled, all(-128.0f)), all(127.0f));
                vi code = inverse == 0.0f ? zero : codes_of(scaled);
                total = total + code;
#ifdef HAS_REACH
                size = size + size_of(code);
#endif
                store_codes(codes + j, code);
            }
            acts->scales[at] = fp4 ? 0.5f * scale : scale;
            acts->sums[at] = sum_codes(total);
#ifdef HAS_REACH
            acts->reach[at] = reach_of(total, size);
#else
            (void)size;
#endif
        }
    }
}

static void quantize(const qs_linear *op, const float *x, const qs_acts *acts, int64_t row)
{
    if (op->permutation || op->act_group % LANES || op->x_width != op->k)
        QS_NAME(quantize)(op, x, acts, row);
    else if (op->act_dtype == QS_F4)
        quantize_lanes(op, x, acts, row, 1);
    else
        quantize_lanes(op, x, acts, row, 0);
}

/* Numbers to int8 codes of a cache: saturated at -127 .. 127, -128 for what is not finite. */
INLINE vi kv_codes(vf x)
{
    vf kept = lower(higher(x, all(-127.0f)), all(127.0f)), zero = all(0.0f);
    return codes_of(chosen(equal(x - x, zero), kept, all(-128.0f)));
}

/* Keys lie 16 values apart, so only their rounding is worth vectors. */
static void rope_kv(const qs_rope_kv *op, float *row, int32_t position, int32_t slot, int32_t kv_head)
{
    const int32_t dim = op->head_dim, offset = slot % QS_LANES;
    const int64_t base = ((int64_t)(slot / QS_LANES) * op->kv_heads + kv_head) * dim * QS_LANES;
    if (dim % QS_LANES || (op->kv_dtype != QS_F16 && op->kv_dtype != QS_I8)) {
        QS_NAME(rope_kv)(op, row, position, slot, kv_head);
        return;
    }
    const float *k = QS_NAME(rotate_heads)(op, row, position, kv_head), *v = k + (int64_t)op->kv_heads * dim;
    if (op->kv_dtype == QS_I8) {
        int8_t *keys = (int8_t *)op->k_cache + base + offset, *values = (int8_t *)op->v_cache + base + offset * dim;
        for (int32_t j = 0; j < dim; j += LANES) {
            int8_t codes[LANES];
            store_codes(codes, kv_codes(load(k + j) / all(op->k_scale[kv_head])));
            for (int i = 0; i < LANES; i++)
                keys[(j + i) * QS_LANES] = codes[i];
            store_codes(values + j, kv_codes(load(v + j) / all(op->v_scale[kv_head])));
        }
        return;
    }
    uint16_t *keys = (uint16_t *)op->k_cache + base + offset, *values = (uint16_t *)op->v_cache + base + offset * dim;
    for (int32_t j = 0; j < dim; j += LANES) {
        uint16_t halves[LANES];
        store_halves(halves, load(k + j));
        for (int i = 0; i < LANES; i++)
            keys[(j + i) * QS_LANES] = halves[i];
        store_halves(values + j, load(v + j));
    }
}
