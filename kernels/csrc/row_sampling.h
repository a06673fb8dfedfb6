/* Drawing the token of a row. Included by portable.h, so that the compiler vectorizes it for each ISA.
 *
 * A row is never sorted. Tokens are counted in bins by their logit, which gives the mass and number of all above any
 * bin; only the tokens of the one bin in which a cut or the point lies are put in order. */

#include <float.h>
#include <stdlib.h>

#define BINS 2048
#define SPANS 1024 /* parts of a row, whose highest logits or masses are kept */
#define DEPTHS 8

typedef struct {
    float logit;
    int32_t token;
} QS_NAME(ranked);

typedef struct {
    const float *x;
    int32_t vocab;
    int32_t span, spans;
    float top, lowest, floor, inverse, per_bin; /* lowest: above minus infinity */
    float highest[SPANS]; /* of each span */
    double mass[BINS];
    int32_t seen, weighty, above; /* tokens in bins; those with any weight; those of at least min_p */
    int32_t count[BINS];
    int32_t sorted, room; /* the bin that lies in `order`, and how many it may hold */
    QS_NAME(ranked) *order;
} QS_NAME(bins);

static inline float QS_NAME(weight)(const QS_NAME(bins) *bins, float logit)
{
    return QS_NAME(exp)(((logit < FLT_MAX ? logit : FLT_MAX) - bins->top) * bins->inverse);
}

static inline int32_t QS_NAME(bin)(const QS_NAME(bins) *bins, float logit)
{
    float bin = (bins->top - logit) * bins->per_bin;
    return bin > 0.0f ? (bin < BINS - 1 ? (int32_t)bin : BINS - 1) : 0;
}

/* Fills the bins with the tokens at `floor` or above. */
static void QS_NAME(fill)(QS_NAME(bins) *bins, float floor, float min_p)
{
    float range = bins->top - floor;
    bins->floor = floor;
    bins->per_bin = range > 0 && range < FLT_MAX ? BINS / range : 0.0f;
    for (int32_t s = 0; s < bins->spans; s++) {
        int32_t end = (s + 1) * bins->span < bins->vocab ? (s + 1) * bins->span : bins->vocab;
        for (int32_t j = s * bins->span; bins->highest[s] >= floor && j < end; j++)
            if (bins->x[j] >= floor) {
                int32_t bin = QS_NAME(bin)(bins, bins->x[j]);
                float weight = QS_NAME(weight)(bins, bins->x[j]);
                bins->count[bin]++;
                bins->mass[bin] += weight;
                bins->seen++;
                bins->weighty += weight > 0;
                bins->above += weight >= min_p;
            }
    }
}

/* A floor above which the `number` likeliest tokens lie: as many spans have something at it or above. */
static float QS_NAME(floor_of_number)(const QS_NAME(bins) *bins, int32_t number)
{
    float left[SPANS];
    int32_t low = 0, high = bins->spans - 1;
    memcpy(left, bins->highest, sizeof(float) * (size_t)bins->spans);
    while (low < high) { /* the element of that rank in falling order (Hoare, 1961) */
        float pivot = left[(low + high) / 2];
        int32_t i = low, j = high;
        while (i <= j) {
            while (left[i] > pivot)
                i++;
            while (left[j] < pivot)
                j--;
            if (i <= j) {
                float swapped = left[i];
                left[i++] = left[j];
                left[j--] = swapped;
            }
        }
        if (number - 1 <= j)
            high = j;
        else if (number - 1 >= i)
            low = i;
        else
            break;
    }
    return left[number - 1];
}

/* A floor above which a share of the mass lies, and in `total` the mass of all. */
static float QS_NAME(floor_of_share)(const QS_NAME(bins) *bins, double share, double *total)
{
    static const float depths[DEPTHS] = {0.5f, 1, 2, 3, 5, 8, 12, 16};
    float floors[DEPTHS];
    double above[DEPTHS] = {0};
    *total = 0;
    for (int d = 0; d < DEPTHS; d++)
        floors[d] = bins->top - depths[d] / bins->inverse;
    for (int32_t s = 0; s < bins->spans; s++) {
        float sums[QS_LANES] = {0}, deep[DEPTHS][QS_LANES] = {{0}}, weights[QS_LANES];
        int32_t j = s * bins->span, end = j + bins->span < bins->vocab ? j + bins->span : bins->vocab;
        for (; j + QS_LANES <= end; j += QS_LANES) {
            const float *x = bins->x + j;
            for (int i = 0; i < QS_LANES; i++)
                weights[i] = QS_NAME(weight)(bins, x[i]);
            for (int i = 0; i < QS_LANES; i++)
                sums[i] += weights[i];
            for (int d = 0; d < DEPTHS; d++)
                for (int i = 0; i < QS_LANES; i++)
                    deep[d][i] += x[i] >= floors[d] ? weights[i] : 0.0f;
        }
        for (int i = 0; j < end; j++, i++) {
            float weight = QS_NAME(weight)(bins, bins->x[j]);
            sums[i] += weight;
            for (int d = 0; d < DEPTHS; d++)
                deep[d][i] += bins->x[j] >= floors[d] ? weight : 0.0f;
        }
        for (int i = 0; i < QS_LANES; i++)
            *total += sums[i];
        for (int d = 0; d < DEPTHS; d++)
            for (int i = 0; i < QS_LANES; i++)
                above[d] += deep[d][i];
    }
    for (int d = 0; d < DEPTHS; d++)
        if (above[d] * (1 - 1e-6) >= share * *total)
            return floors[d];
    return bins->lowest;
}

static int QS_NAME(before)(const void *left, const void *right)
{
    const QS_NAME(ranked) *a = left, *b = right;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->token < b->token ? -1 : 1;
}

/* The tokens of a bin by rank; NULL without memory. */
static const QS_NAME(ranked) *QS_NAME(sorted)(QS_NAME(bins) *bins, int32_t bin)
{
    if (bins->sorted == bin)
        return bins->order;
    if (bins->room < bins->count[bin]) {
        QS_NAME(ranked) *more = realloc(bins->order, sizeof(*more) * (size_t)bins->count[bin]);
        if (!more)
            return NULL;
        bins->order = more;
        bins->room = bins->count[bin];
    }
    for (int32_t j = 0, found = 0; found < bins->count[bin]; j++)
        if (bins->x[j] >= bins->floor && QS_NAME(bin)(bins, bins->x[j]) == bin)
            bins->order[found++] = (QS_NAME(ranked)){bins->x[j], j};
    qsort(bins->order, (size_t)bins->count[bin], sizeof(*bins->order), QS_NAME(before));
    bins->sorted = bin;
    return bins->order;
}

/* The mass of the first `number` tokens by rank; -1 without memory. */
static double QS_NAME(first_mass)(QS_NAME(bins) *bins, int32_t number)
{
    double mass = 0;
    int32_t bin = 0;
    for (; bin < BINS && bins->count[bin] <= number; bin++) {
        mass += bins->mass[bin];
        number -= bins->count[bin];
    }
    if (number == 0 || bin == BINS)
        return mass;
    const QS_NAME(ranked) *order = QS_NAME(sorted)(bins, bin);
    for (int32_t i = 0; order && i < number; i++)
        mass += QS_NAME(weight)(bins, order[i].logit);
    return order ? mass : -1;
}

/* How many tokens by rank it takes until their mass is `goal`, or, where `beyond`, more; -1 without memory. */
static int32_t QS_NAME(reaching)(QS_NAME(bins) *bins, double goal, int beyond)
{
    double mass = 0;
    int32_t number = 0, bin = 0;
    for (; bin < BINS; bin++) {
        double next = mass + bins->mass[bin];
        if (bins->count[bin] && (beyond ? next > goal : next >= goal))
            break;
        mass = next;
        number += bins->count[bin];
    }
    if (bin == BINS)
        return bins->seen;
    const QS_NAME(ranked) *order = QS_NAME(sorted)(bins, bin);
    if (!order)
        return -1;
    for (int32_t i = 0; i < bins->count[bin]; i++) {
        mass += QS_NAME(weight)(bins, order[i].logit);
        number++;
        if (beyond ? mass > goal : mass >= goal)
            break;
    }
    return number;
}

/* The token of rank `number` (1 is the likeliest); -1 without memory. */
static int32_t QS_NAME(token_of)(QS_NAME(bins) *bins, int32_t number)
{
    int32_t bin = 0;
    for (; bins->count[bin] < number; bin++)
        number -= bins->count[bin];
    const QS_NAME(ranked) *order = QS_NAME(sorted)(bins, bin);
    return order ? order[number - 1].token : -1;
}

static int32_t QS_NAME(draw_ranked)(QS_NAME(bins) *bins, int32_t top_k, double top_p, float min_p, double point)
{
    double total = 0, share = top_p * (1 - 1e-6); /* sums of f32 are no more exact */
    if (top_k > 0)
        QS_NAME(fill)(bins, top_k <= bins->spans ? QS_NAME(floor_of_number)(bins, top_k) : bins->lowest, min_p);
    else
        QS_NAME(fill)(bins, QS_NAME(floor_of_share)(bins, share, &total), min_p);
    int32_t kept = top_k > 0 && top_k < bins->seen ? top_k : bins->seen;
    if (top_p < 1.0) {
        double of = top_k > 0 ? QS_NAME(first_mass)(bins, kept) : total;
        int32_t reaching = of < 0 ? -1 : QS_NAME(reaching)(bins, share * of, 0);
        if (reaching < 0)
            return -2;
        kept = reaching < kept ? reaching : kept;
    }
    kept = min_p > 0 && bins->above < kept ? bins->above : kept;
    kept = bins->weighty < kept ? bins->weighty : kept;
    kept = kept > 1 ? kept : 1;
    double mass = QS_NAME(first_mass)(bins, kept);
    int32_t number = mass < 0 ? -1 : QS_NAME(reaching)(bins, point * mass, 1);
    if (number < 0)
        return -2;
    int32_t token = QS_NAME(token_of)(bins, number < kept ? number : kept);
    return token < 0 ? -2 : token;
}

/* In the order of their ids, as `min_p` alone keeps tokens. */
static int32_t QS_NAME(draw_unranked)(const QS_NAME(bins) *bins, float min_p, double point)
{
    int32_t span = bins->span, spans = bins->spans, last = 0;
    double mass[SPANS], total = 0, before = 0;
    for (int32_t s = 0; s < spans; s++) {
        float sums[QS_LANES] = {0};
        int32_t j = s * span, end = j + span < bins->vocab ? j + span : bins->vocab;
        mass[s] = 0;
        for (; j + QS_LANES <= end; j += QS_LANES)
            for (int i = 0; i < QS_LANES; i++) {
                float weight = QS_NAME(weight)(bins, bins->x[j + i]);
                sums[i] += weight >= min_p ? weight : 0.0f;
            }
        for (int i = 0; i < QS_LANES; i++)
            mass[s] += sums[i];
        for (; j < end; j++) {
            float weight = QS_NAME(weight)(bins, bins->x[j]);
            mass[s] += weight >= min_p ? weight : 0.0f;
        }
        total += mass[s];
    }
    double target = point * total;
    int32_t s = 0;
    for (; s < spans - 1 && before + mass[s] <= target; s++)
        before += mass[s];
    while (s > 0 && mass[s] == 0) /* rounding went past the last token with any weight */
        before -= mass[--s];
    for (int32_t j = s * span; j < bins->vocab; j++) {
        float weight = QS_NAME(weight)(bins, bins->x[j]);
        if (weight < min_p || weight == 0)
            continue;
        last = j;
        before += weight;
        if (before > target)
            break;
    }
    return last;
}

/* The highest logit, and the lowest above minus infinity. */
static void QS_NAME(look)(const float *x, int32_t count, float *highest, float *lowest)
{
    float high[QS_LANES], low[QS_LANES];
    int32_t j = 0;
    for (int i = 0; i < QS_LANES; i++) {
        high[i] = *highest;
        low[i] = *lowest;
    }
    for (; j + QS_LANES <= count; j += QS_LANES)
        for (int i = 0; i < QS_LANES; i++) {
            float least = x[j + i] >= -FLT_MAX ? x[j + i] : FLT_MAX;
            high[i] = x[j + i] > high[i] ? x[j + i] : high[i];
            low[i] = least < low[i] ? least : low[i];
        }
    for (; j < count; j++) {
        high[0] = x[j] > high[0] ? x[j] : high[0];
        low[0] = x[j] >= -FLT_MAX && x[j] < low[0] ? x[j] : low[0];
    }
    for (int i = 0; i < QS_LANES; i++) {
        *highest = high[i] > *highest ? high[i] : *highest;
        *lowest = low[i] < *lowest ? low[i] : *lowest;
    }
}

static int32_t QS_NAME(draw)(const qs_row_sampling *op, int64_t row)
{
    QS_NAME(bins) bins = {.x = op->rows[row], .vocab = op->vocab, .sorted = -1, .top = -FLT_MAX, .lowest = FLT_MAX};
    bins.span = (op->vocab / SPANS / QS_LANES + 1) * QS_LANES;
    bins.spans = (op->vocab + bins.span - 1) / bins.span;
    for (int32_t s = 0; s < bins.spans; s++) {
        int32_t end = (s + 1) * bins.span < op->vocab ? (s + 1) * bins.span : op->vocab;
        bins.highest[s] = -INFINITY;
        QS_NAME(look)(op->rows[row] + s * bins.span, end - s * bins.span, &bins.highest[s], &bins.lowest);
        bins.top = bins.highest[s] > bins.top ? bins.highest[s] : bins.top;
    }
    bins.top = bins.top < FLT_MAX ? bins.top : FLT_MAX;
    double inverse = 1.0 / op->temperature[row];
    bins.inverse = inverse < FLT_MAX ? (float)inverse : FLT_MAX;
    float min_p = (float)op->min_p[row];
    int32_t token = op->top_k[row] > 0 || op->top_p[row] < 1.0
                        ? QS_NAME(draw_ranked)(&bins, op->top_k[row], op->top_p[row], min_p, op->point[row])
                        : QS_NAME(draw_unranked)(&bins, min_p, op->point[row]);
    free(bins.order);
    return token;
}

#undef BINS
#undef SPANS
#undef DEPTHS
