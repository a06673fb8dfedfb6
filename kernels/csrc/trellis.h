/* Trellis codes: the state of a weight is the last QS_STATE_BITS bits of a stream, and its code a hash of that state. Part
 * of portable.h. */

/* The code of a state. Of all states, codes lie nearly as a normal distribution around QS_TRELLIS_ZERO. */
static inline int32_t QS_NAME(trellis_code)(uint32_t state)
{
    uint32_t hash = state * QS_TRELLIS_FACTOR;
    return (int32_t)((hash & 15) + (hash >> 4 & 15) + (hash >> 8 & 15) + (hash >> 12 & 15));
}

/* A tile of qs_linear in u8 from one of a trellis. `before` is the tile whose lanes precede. */
static void QS_NAME(decode)(const uint8_t *own, const uint8_t *before, int32_t inputs, int32_t bits, uint8_t *out)
{
    const int32_t bytes = 2 * bits;
    for (int32_t i = 0; i < inputs; i++, own += bytes, before += bytes) {
        /* Lane 15 ends with the last bit of own. */
        uint32_t window = (uint32_t)(before[bytes - 2] | before[bytes - 1] << 8) >> (16 - QS_STATE_BITS);
        for (int32_t l = 0; l < QS_LANES; l++) {
            int32_t at = l * bits, byte = at >> 3;
            uint32_t next = own[byte] | (byte + 1 < bytes ? (uint32_t)own[byte + 1] << 8 : 0);
            uint32_t symbol = next >> (at & 7) & ((1u << bits) - 1);
            window = window >> bits | symbol << (QS_STATE_BITS - bits);
            out[i / 4 * QS_LANES * 4 + l * 4 + i % 4] = (uint8_t)QS_NAME(trellis_code)(window);
        }
    }
}

#define STATES (1 << QS_STATE_BITS)
#define NEAR_THE_SEAM (QS_RING / 2) /* weights on each side of the seam by which the state there is chosen */

/* What the encoder works in. A path is built from states whose last symbol is in the lowest bits: then those that may
 * come before a class of states are STATES >> bits apart. */
typedef struct {
    float number[STATES], cost[STATES], best[STATES];
    uint8_t before[QS_RING * STATES / 4]; /* [weight][class]: which of the states that may come before did */
} QS_NAME(trellis);

typedef float QS_NAME(eight) __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t QS_NAME(whole) __attribute__((vector_size(32), aligned(4), may_alias));

/* The costs of all states behind `count` numbers x of weights `worth`. The first state continues `start`, the low bits
 * of a state, or any where that is negative. */
static inline __attribute__((always_inline)) void QS_NAME(walk_trellis)(
    QS_NAME(trellis) *at, const float *x, const float *worth, int32_t count, int32_t start, const int32_t bits)
{
    typedef QS_NAME(eight) eight;
    typedef QS_NAME(whole) whole;
    const int32_t branches = 1 << bits, classes = STATES >> bits;
    float *best = at->best;
    for (int32_t q = 0; q < classes; q++)
        best[q] = start < 0 || q == start ? 0.0f : 1e30f;
    for (int32_t t = 0; t < count; t++) {
        for (int32_t q = 0; t && q < classes; q += 8) {
            eight least = *(eight *)(at->cost + q);
            whole from = {0};
            for (int32_t j = 1; j < branches; j++) {
                eight other = *(eight *)(at->cost + j * classes + q);
                whole less = other < least;
                least = (eight)((less & (whole)other) | (~less & (whole)least));
                from = (less & j) | (~less & from);
            }
            *(eight *)(best + q) = least;
            for (int32_t i = 0; i < 8; i++)
                at->before[t * classes + q + i] = (uint8_t)from[i];
        }
        for (int32_t s = 0; s < STATES; s += 8) {
            const float *first = best + (s >> bits);
            const int second = bits == 2; /* two classes in a vector */
            eight reached = {first[0], first[0], first[0], first[0],
                             first[second], first[second], first[second], first[second]};
            eight off = x[t] - *(eight *)(at->number + s);
            *(eight *)(at->cost + s) = reached + off * worth[t] * off;
        }
    }
}

/* The symbols of the cheapest path, of those whose last state ends with `end` unless that is negative. */
static void QS_NAME(trace_back)(const QS_NAME(trellis) *at, int32_t count, int32_t end, int32_t bits, uint8_t *symbols)
{
    const int32_t classes = STATES >> bits, branches = 1 << bits;
    int32_t state = end < 0 ? 0 : end;
    for (int32_t s = state; s < STATES; s += end < 0 ? 1 : classes)
        state = at->cost[s] < at->cost[state] ? s : state;
    for (int32_t t = count - 1; t >= 0; t--) {
        int32_t class = state >> bits;
        symbols[t] = (uint8_t)(state & (branches - 1));
        state = t ? at->before[t * classes + class] * classes + class : state;
    }
}

/* Symbols [QS_RING] whose codes, each less QS_TRELLIS_ZERO, are near x: the first states continue the last. */
static inline __attribute__((always_inline)) void QS_NAME(encode_bits)(
    QS_NAME(trellis) *at, const float *x, const float *worth, uint8_t *symbols, const int32_t bits)
{
    enum { NEAR = NEAR_THE_SEAM };
    float around[2 * NEAR], of_worth[2 * NEAR];
    for (int32_t i = 0; i < 2 * NEAR; i++) {
        around[i] = x[(i + QS_RING - NEAR) % QS_RING];
        of_worth[i] = worth[(i + QS_RING - NEAR) % QS_RING];
    }
    QS_NAME(walk_trellis)(at, around, of_worth, 2 * NEAR, -1, bits);
    QS_NAME(trace_back)(at, 2 * NEAR, -1, bits, symbols);
    int32_t seam = 0;
    for (int32_t i = NEAR - QS_STATE_BITS / bits + 1; i < NEAR; i++)
        seam = seam << bits | symbols[i];
    QS_NAME(walk_trellis)(at, x, worth, QS_RING, seam, bits);
    QS_NAME(trace_back)(at, QS_RING, seam, bits, symbols);
}

static void QS_NAME(encode)(QS_NAME(trellis) *at, const float *x, const float *worth, uint8_t *symbols, int32_t bits)
{
    switch (bits) {
    case 2: QS_NAME(encode_bits)(at, x, worth, symbols, 2); break;
    case 3: QS_NAME(encode_bits)(at, x, worth, symbols, 3); break;
    case 4: QS_NAME(encode_bits)(at, x, worth, symbols, 4); break;
    }
}

/* In a state of the encoder the last symbol is lowest, in the stream it is highest. */
static void QS_NAME(prepare_trellis)(QS_NAME(trellis) *at, int32_t bits)
{
    for (int32_t s = 0; s < STATES; s++) {
        uint32_t state = 0;
        for (int32_t i = 0; i < QS_STATE_BITS; i += bits)
            state |= ((uint32_t)s >> i & ((1u << bits) - 1)) << (QS_STATE_BITS - bits - i);
        at->number[s] = (float)(QS_NAME(trellis_code)(state) - QS_TRELLIS_ZERO);
    }
}

#define TRELLIS_BLOCK 32 /* inputs whose errors reach all later ones at once */

static int64_t QS_NAME(trellis_bytes)(const qs_trellis_sweep *op)
{
    return (int64_t)sizeof(QS_NAME(trellis)) + (int64_t)sizeof(float) * QS_RING * (op->inputs + TRELLIS_BLOCK);
}

static void QS_NAME(trellis_sweep)(const qs_trellis_sweep *op, int64_t panel, void *memory)
{
    enum { OUTPUTS = QS_RING };
    QS_NAME(trellis) *at = memory;
    float *left = (float *)(at + 1), *errors = left + (int64_t)op->inputs * OUTPUTS;
    const int64_t inputs = op->inputs, groups = inputs / op->width, first = panel * OUTPUTS;
    const int32_t count = op->outputs - first < OUTPUTS ? (int32_t)(op->outputs - first) : OUTPUTS;
    uint8_t *symbols = op->symbols + panel * inputs * OUTPUTS;
    QS_NAME(prepare_trellis)(at, op->bits);
    for (int64_t j = 0; j < inputs; j++)
        for (int32_t r = 0; r < OUTPUTS; r++)
            left[j * OUTPUTS + r] = r < count ? op->weight[(first + r) * inputs + op->order[j]] : 0.0f;
    for (int64_t j = 0; j < inputs; j++) {
        const int64_t start = j / TRELLIS_BLOCK * TRELLIS_BLOCK, input = op->order[j];
        const float *upper = op->upper ? op->upper + j * inputs : NULL, *now = left + j * OUTPUTS;
        float x[OUTPUTS], worth[OUTPUTS], scale[OUTPUTS], *error = errors + (j - start) * OUTPUTS, total = 0.0f;
        for (int32_t r = 0; r < OUTPUTS; r++) {
            scale[r] = r < count ? op->scales[(first + r) * groups + input / op->width] : 0.0f;
            worth[r] = scale[r] * scale[r];
            total += worth[r];
            float steps = scale[r] != 0.0f ? now[r] / scale[r] : 0.0f;
            steps = steps > -QS_TRELLIS_ZERO ? steps : -QS_TRELLIS_ZERO; /* also for NaN */
            x[r] = steps < QS_TRELLIS_ZERO ? steps : QS_TRELLIS_ZERO;
        }
        for (int32_t r = 0; r < OUTPUTS; r++) /* relative: costs stay near 1 */
            worth[r] = total > 0.0f && total < 1e30f ? worth[r] * ((float)count / total) : 1.0f;
        uint8_t *found = symbols + input * OUTPUTS;
        QS_NAME(encode)(at, x, worth, found, op->bits);
        if (!upper)
            continue;
        uint32_t window = 0;
        for (int32_t r = OUTPUTS - QS_STATE_BITS / op->bits; r < OUTPUTS; r++)
            window = window >> op->bits | (uint32_t)found[r] << (QS_STATE_BITS - op->bits);
        for (int32_t r = 0; r < OUTPUTS; r++) {
            window = window >> op->bits | (uint32_t)found[r] << (QS_STATE_BITS - op->bits);
            float aim = !op->aims ? now[r] : r < count ? op->aims[(first + r) * inputs + input] : 0.0f;
            float number = (float)(QS_NAME(trellis_code)(window) - QS_TRELLIS_ZERO);
            error[r] = r < count ? (aim - number * scale[r]) / upper[j] : 0.0f;
        }
        for (int64_t later = j + 1; later < inputs && later < start + TRELLIS_BLOCK; later++)
            for (int32_t r = 0; r < OUTPUTS; r++)
                left[later * OUTPUTS + r] -= upper[later] * error[r];
        if (j + 1 - start < TRELLIS_BLOCK)
            continue;
        for (int64_t later = j + 1; later < inputs; later++) {
            float sums[OUTPUTS];
            memcpy(sums, left + later * OUTPUTS, sizeof sums);
            for (int32_t k = 0; k < TRELLIS_BLOCK; k++)
                for (int32_t r = 0; r < OUTPUTS; r++)
                    sums[r] -= op->upper[(start + k) * inputs + later] * errors[k * OUTPUTS + r];
            memcpy(left + later * OUTPUTS, sums, sizeof sums);
        }
    }
}
#undef STATES
#undef NEAR_THE_SEAM
#undef TRELLIS_BLOCK
