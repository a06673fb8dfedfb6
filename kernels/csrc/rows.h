/* Row-wise computations over vectors: norms, SiLU, softmax, the rounding of inputs, rotation. Included behind
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

/* As in portable.h, with fused products: 2 ulp over [-87, 88]. */
INLINE vf exp_lanes(vf x)
{
    vf clamped = lower(all(88.0f), higher(all(-87.0f), x));
    vf n = nearest(clamped * all(1.44269504088896341f));
    vf r = fused(n, all(-0.693359375f), clamped);
    r = fused(n, all(2.12194440e-4f), r);
    vf p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r + all(1.0f));
    return unless_below(times_power(p, n), x, all(-87.0f));
}

INLINE vf silu(vf x)
{
    return x / (all(1.0f) + exp_lanes(all(0.0f) - x));
}

/* The sum of QS_LANES numbers. */
INLINE float sum_parts(const vf *x)
{
    vf total = x[0];
    UNROLL for (int p = 1; p < PARTS; p++)
        total = total + x[p];
    return sum(total);
}

static void rmsnorm(const float *x, const float *weight, float *out, int32_t width, float eps)
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
    float inverse = 1.0f / sqrtf(total / (float)width + eps);
    for (j = 0; j + LANES <= width; j += LANES)
        store(out + j, load(x + j) * all(inverse) * load(weight + j));
    for (; j < width; j++)
        out[j] = x[j] * inverse * weight[j];
}

static void silu_mul(const float *gate, const float *up, float *out, int32_t width)
{
    int32_t j = 0;
    for (; j + LANES <= width; j += LANES)
        store(out + j, silu(load(gate + j)) * load(up + j));
    QS_NAME(silu_mul)(gate + j, up + j, out + j, width - j);
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

static void quantize(const qs_linear *op, const float *x, int8_t *codes, float *scales, int32_t *sums)
{
    if (op->permutation || op->act_group % LANES || op->x_width != op->k) {
        QS_NAME(quantize)(op, x, codes, scales, sums);
        return;
    }
    const vi zero = codes_of(all(0.0f));
    for (int32_t start = 0, g = 0; start < op->k; start += op->act_span) {
        int32_t end = op->k - start < op->act_span ? op->k : start + op->act_span;
        vi top = zero;
        float inverse;
        for (int32_t j = start; j < end; j += LANES)
            top = magnitudes(top, load(x + j));
        float scale = QS_NAME(span_scale)(op, highest_bits(top), &inverse);
        for (int32_t part = start; part < end; part += op->act_group, g++) {
            vi total = zero;
            for (int32_t j = part; j < part + op->act_group; j += LANES) {
                vf scaled = higher(load(x + j) * all(inverse), all(-128.0f));
                vi code = inverse == 0.0f ? zero : codes_of(lower(scaled, all(127.0f)));
                total = total + code;
                store_codes(codes + j, code);
            }
            scales[g] = scale;
            sums[g] = sum_codes(total);
        }
    }
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
    if (op->kv_dtype != QS_F16 && op->kv_dtype != QS_I8) {
        QS_NAME(rope_kv)(op, row, position, slot, kv_head);
        return;
    }
    const float *k = QS_NAME(rotate_heads)(op, row, position, kv_head), *v = k + (int64_t)op->kv_heads * dim;
    if (op->kv_dtype == QS_I8) {
        int8_t *keys = (int8_t *)op->k_cache + base + offset, *values = (int8_t *)op->v_cache + base + offset * dim;
        for (int32_t j = 0; j < dim; j += LANES) { /* dim is a multiple of 16 */
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
