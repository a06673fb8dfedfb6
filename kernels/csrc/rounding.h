/* The inner loops of quantizers, in portable C: scales of least error, and GPTQ's pass over the inputs. Part of
 * portable.h. */

/* Half to even, for |x| < 2^22. */
static inline float QS_NAME(round)(float x)
{
    return (x + 12582912.0f) - 12582912.0f;
}

static inline float QS_NAME(between)(float x, float low, float high)
{
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* With codes c = w * factor, rounded and kept within low .. high, the best scale is sum(h w c) / sum(h c c), and it
 * removes the returned sum(h w c)^2 / sum(h c c) of the error sum(h w w). NaN where every code is zero. */
static inline float QS_NAME(fit_scale)(const float *w, const float *h, int32_t width, float factor, float low,
                                       float high, float *scale)
{
    float a = 0, n = 0;
#pragma omp simd reduction(+ : a, n)
    for (int32_t j = 0; j < width; j++) {
        float code = QS_NAME(between)(QS_NAME(round)(w[j] * factor), low, high);
        float weighted = h[j] * code;
        a += weighted * w[j];
        n += weighted * code;
    }
    *scale = a / n;
    return a * a / n;
}

static float QS_NAME(scale_error)(const float *w, const float *h, int32_t width, float scale, float zero, float top)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int32_t j = 0; j < width; j++) {
        float steps = QS_NAME(between)(w[j] / scale, -4096.0f, 4096.0f);
        float error = QS_NAME(between)(QS_NAME(round)(steps), -zero, top - zero) * scale - w[j];
        sum += error * error * h[j];
    }
    return sum;
}

static void QS_NAME(search_scale)(const qs_scale_search *op, int64_t row)
{
    const float smallest = 1.0f / (1 << 24), largest = 65504.0f;
    const float *w = op->weight + row * op->width, *h = op->importance + row % op->period * op->width;
    float low = 0, high = 0, best = -1, start = op->scales[row], found = start, scale;
    float top = (float)op->max_code, half = (float)op->zero;
    float start_zero = op->zeros ? op->zeros[row] : half, found_zero = start_zero;
    for (int32_t j = 0; j < op->width; j++) {
        low = w[j] < low ? w[j] : low;
        high = w[j] > high ? w[j] : high;
    }
    float magnitude = -low > high ? -low : high;
    magnitude = magnitude > smallest ? magnitude : smallest;
    for (int32_t s = 0; s < op->steps; s++) {
        if (!op->zeros) {
            /* The mirrored weight with the mirrored scale has the same values, but other codes are clipped. */
            for (int sign = 1; sign >= -1; sign -= 2) {
                float first = sign > 0 ? -half : 1 - half, last = sign > 0 ? half - 1 : half;
                float gain = QS_NAME(fit_scale)(w, h, op->width, op->ranges[s] / magnitude, first, last, &scale);
                if (gain > best) {
                    best = gain;
                    found = (float)sign * scale;
                }
            }
            continue;
        }
        float candidate = (high - low) * (op->ranges[s] / top);
        candidate = candidate > smallest ? candidate : smallest;
        float middle = QS_NAME(between)(QS_NAME(round)(-low * op->ranges[s] / candidate), 0, top);
        for (int shift = -1; shift <= 1; shift++) {
            float zero = QS_NAME(between)(middle + (float)shift, 0, top);
            float gain = QS_NAME(fit_scale)(w, h, op->width, 1.0f / candidate, -zero, top - zero, &scale);
            if (gain > best) {
                best = gain;
                found = scale;
                found_zero = zero;
            }
        }
    }
    float size = QS_NAME(between)(found < 0 ? -found : found, smallest, largest);
    found = qs_half_to_float(qs_float_to_half(size)) * (found < 0 ? -1.0f : 1.0f);
    if (QS_NAME(scale_error)(w, h, op->width, found, found_zero, top) <=
        QS_NAME(scale_error)(w, h, op->width, start, start_zero, top)) {
        op->scales[row] = found;
        if (op->zeros)
            op->zeros[row] = found_zero;
    }
}

static void QS_NAME(choose_scale)(const qs_scale_choice *op, int64_t row)
{
    const float *w = op->weight + row * op->width, *h = op->importance + row % op->period * op->width;
    const float *candidates = op->candidates + row * op->steps;
    float best = 0;
    for (int32_t s = 0; s < op->steps; s++) {
        float scale = candidates[s], sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int32_t j = 0; j < op->width; j++) {
            float size = w[j] < 0 ? -w[j] : w[j], steps = QS_NAME(between)(size / scale, 0, 6);
            float unit = QS_NAME(e2m1_unit)(steps), error = QS_NAME(round)(steps / unit) * unit * scale - size;
            sum += error * error * h[j];
        }
        if (s == 0 || sum < best) {
            best = sum;
            op->scales[row] = scale;
        }
    }
}

#define SWEEP_BLOCK 16 /* inputs that are rounded one after the other, before their errors are applied to later ones */
#define SWEEP_SPAN 64  /* earlier inputs whose errors reach a block at once: their part of `upper` stays in cache */
#ifdef __AVX512F__
#define SWEEP_LANES 16
#else
#define SWEEP_LANES 8
#endif

typedef float QS_NAME(floats) __attribute__((vector_size(4 * SWEEP_LANES), aligned(4), may_alias));

/* The effect of the errors of `count` inputs, QS_SWEEP_OUTPUTS each, on four later ones: two vectors of outputs at a
 * time, so that the sums stay in registers. */
static inline void QS_NAME(apply_errors)(float *left, const float *errors, const float *upper, int64_t stride,
                                         int32_t count)
{
    typedef QS_NAME(floats) floats;
    enum { OUTPUTS = QS_SWEEP_OUTPUTS, LANES = SWEEP_LANES };
    for (int32_t first = 0; first < OUTPUTS; first += 2 * LANES) {
        floats sums[4][2];
        for (int r = 0; r < 4; r++)
            for (int v = 0; v < 2; v++)
                sums[r][v] = *(floats *)(left + OUTPUTS * r + first + LANES * v);
        for (int32_t k = 0; k < count; k++)
            for (int r = 0; r < 4; r++)
                for (int v = 0; v < 2; v++)
                    sums[r][v] -= upper[k * stride + r] * *(const floats *)(errors + OUTPUTS * k + first + LANES * v);
        for (int r = 0; r < 4; r++)
            for (int v = 0; v < 2; v++)
                *(floats *)(left + OUTPUTS * r + first + LANES * v) = sums[r][v];
    }
}

/* Every output by itself, so that its bits depend on neither its neighbours nor the ISA. */
static void QS_NAME(sweep)(const qs_sweep *op, int64_t chunk, float *errors)
{
    enum { OUTPUTS = QS_SWEEP_OUTPUTS };
    int64_t inputs = op->inputs, groups = inputs / op->width, first = chunk * OUTPUTS;
    int32_t count = op->outputs - first < OUTPUTS ? (int32_t)(op->outputs - first) : OUTPUTS;
    for (int32_t start = 0; start < op->inputs; start += SWEEP_BLOCK) {
        int32_t rows = op->inputs - start < SWEEP_BLOCK ? op->inputs - start : SWEEP_BLOCK;
        float left[SWEEP_BLOCK * OUTPUTS] = {0}, aim[OUTPUTS], scale[OUTPUTS], zero[OUTPUTS], codes[OUTPUTS];
        for (int32_t r = 0; r < rows; r++)
            for (int32_t i = 0; i < count; i++)
                left[r * OUTPUTS + i] = op->weight[(first + i) * inputs + op->order[start + r]];
        /* The last four may be fewer: then numbers of the next row of `upper` are read too and not used. */
        for (int32_t from = 0; from < start; from += SWEEP_SPAN)
            for (int32_t r = 0; r < rows; r += 4)
                QS_NAME(apply_errors)(left + r * OUTPUTS, errors + from * OUTPUTS, op->upper + from * inputs + start + r,
                                      inputs, start - from < SWEEP_SPAN ? start - from : SWEEP_SPAN);
        for (int32_t r = 0; r < rows; r++) {
            const float *upper = op->upper + (start + r) * inputs + start, *now = left + r * OUTPUTS;
            float *error = errors + (start + r) * OUTPUTS, inverse = 1.0f / upper[r];
            int32_t input = op->order[start + r];
            for (int32_t i = 0; i < OUTPUTS; i++) {
                int64_t output = first + (i < count ? i : 0), at = output * groups + input / op->width;
                scale[i] = op->scales[at];
                zero[i] = op->zeros ? op->zeros[at] : (float)op->zero;
                aim[i] = op->aims ? op->aims[output * inputs + input] : now[i];
            }
            if (op->e2m1) {
                for (int32_t i = 0; i < OUTPUTS; i++) {
                    float steps = now[i] / scale[i], size = steps < 0 ? -steps : steps;
                    size = size < 6 ? size : 6; /* also for NaN, which has no code */
                    float unit = QS_NAME(e2m1_unit)(size), first = size < 2 ? 0.0f : size < 4 ? 2.0f : 4.0f;
                    float place = QS_NAME(round)(size / unit), number = place * unit;
                    error[i] = (aim[i] - (steps < 0 ? -number : number) * scale[i]) * inverse;
                    codes[i] = place + first + (steps < 0 && place > 0 ? 8.0f : 0.0f);
                }
            } else {
                for (int32_t i = 0; i < OUTPUTS; i++) {
                    float low = -zero[i], high = (float)op->max_code - zero[i], steps = now[i] / scale[i];
                    steps = steps > low ? steps : low; /* also for NaN, which has no code */
                    steps = QS_NAME(round)(steps < high ? steps : high);
                    error[i] = (aim[i] - steps * scale[i]) * inverse;
                    codes[i] = steps + zero[i];
                }
            }
            for (int32_t i = 0; i < count; i++)
                op->codes[(first + i) * inputs + input] = (uint8_t)codes[i];
            for (int32_t later = r + 1; later < rows; later++)
                for (int32_t i = 0; i < OUTPUTS; i++)
                    left[later * OUTPUTS + i] -= upper[later] * error[i];
        }
    }
}
