/* The choice of experts and the sum of what they give, in portable C. Part of portable.h. */

/* Whether value `a` comes before the best so far: NaN above all, and of equal ones the first. */
static inline int QS_NAME(is_better)(float a, float best)
{
    return a > best || (a != a && best == best);
}

/* The index of the best of `width` values that are not yet `taken`. */
static int32_t QS_NAME(best_left)(const float *values, const uint8_t *taken, int32_t width)
{
    int32_t best = -1;
    for (int32_t i = 0; i < width; i++)
        if (!taken[i] && (best < 0 || QS_NAME(is_better)(values[i], values[best])))
            best = i;
    return best;
}

/* Marks as taken the experts of all groups but the best ones. `sums` has room for all groups. */
static void QS_NAME(leave_groups)(const qs_route *op, const float *choice, uint8_t *taken, float *sums)
{
    const int32_t size = op->count / op->groups;
    uint8_t *dropped = taken + op->count;
    memset(taken, 0, (size_t)op->count);
    for (int32_t g = 0; g < op->groups; g++) {
        sums[g] = 0.0f;
        for (int32_t i = 0; i < op->group_best; i++) {
            int32_t at = g * size + QS_NAME(best_left)(choice + g * size, taken + g * size, size);
            taken[at] = 1;
            sums[g] += choice[at];
        }
    }
    memset(dropped, 0, (size_t)op->groups);
    memset(taken, 1, (size_t)op->count);
    for (int32_t i = 0; i < op->top_groups; i++) {
        int32_t g = QS_NAME(best_left)(sums, dropped, op->groups);
        dropped[g] = 1;
        memset(taken + g * size, 0, (size_t)size);
    }
}

/* `memory` has room for three floats and two bytes for each expert. */
static void QS_NAME(route)(const qs_route *op, const float *logits, int32_t *experts, float *weights, float *memory)
{
    const int32_t count = op->count;
    float *scores = memory, *choice = memory + count, *sums = memory + 2 * count;
    uint8_t *taken = (uint8_t *)(memory + 3 * count);
    if (op->sigmoid)
        for (int32_t i = 0; i < count; i++)
            scores[i] = 1.0f / (1.0f + QS_NAME(exp)(-logits[i]));
    else {
        float top = logits[0];
        double sum = 0.0;
        for (int32_t i = 1; i < count; i++)
            top = logits[i] > top ? logits[i] : top;
        for (int32_t i = 0; i < count; i++)
            sum += scores[i] = QS_NAME(exp)(logits[i] - top);
        for (int32_t i = 0; i < count; i++)
            scores[i] = (float)(scores[i] / sum);
    }
    for (int32_t i = 0; i < count; i++)
        choice[i] = op->bias ? scores[i] + op->bias[i] : scores[i];
    if (op->groups > 1)
        QS_NAME(leave_groups)(op, choice, taken, sums);
    else
        memset(taken, 0, (size_t)count);
    float sum = 0.0f;
    for (int32_t j = 0; j < op->top_k; j++) {
        experts[j] = QS_NAME(best_left)(choice, taken, count);
        taken[experts[j]] = 1;
        weights[j] = scores[experts[j]];
        sum += weights[j];
    }
    if (op->renormalize) {
        sum = sum < 1e-20f ? 1e-20f : sum;
        for (int32_t j = 0; j < op->top_k; j++)
            weights[j] /= sum;
    }
    for (int32_t j = 0; j < op->top_k; j++)
        weights[j] *= op->scale;
}

/* out = sum over j of weights[j] * parts[rows[j], :], in the order of j, or added to out. */
static void QS_NAME(combine)(const float *parts, const int32_t *rows, const float *weights, int32_t top_k, float *out,
                             int32_t width, int32_t accumulate)
{
    float sums[64];
    for (int32_t start = 0; start < width; start += 64) {
        const int32_t some = width - start < 64 ? width - start : 64;
        memset(sums, 0, sizeof sums);
        for (int32_t j = 0; j < top_k; j++) {
            const float *part = parts + (int64_t)rows[j] * width + start;
            for (int32_t i = 0; i < some; i++)
                sums[i] += weights[j] * part[i];
        }
        for (int32_t i = 0; i < some; i++)
            out[start + i] = accumulate ? out[start + i] + sums[i] : sums[i];
    }
}

static void QS_NAME(sigmoid_mul)(const float *gate, float *out, int32_t width, int32_t gates)
{
    for (int32_t i = 0; i < width; i++)
        out[i] *= 1.0f / (1.0f + QS_NAME(exp)(-gate[gates == 1 ? 0 : i]));
}
