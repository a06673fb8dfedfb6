/* Products of float32 with the vectors of one ISA: `floats`, of LANES numbers, and `fused`, which adds a product to a sum.
 * ROWS by VECTORS sums stay in registers. */

#define WIDE (LANES * VECTORS)

/* sums[r][c] = the sum of left[r * row + k * step] * right[k * PANEL + c] over `count` k, c < WIDE. */
INLINE void QS_NAME(block)(const float *left, int64_t row, int64_t step, const float *right, int64_t count,
                           float sums[ROWS][WIDE])
{
    typedef QS_NAME(floats) floats;
    floats all[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            all[r][v] = (floats){0};
    for (int64_t k = 0; k < count; k++, left += step, right += PANEL) {
        floats values[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++)
            values[v] = *(const floats *)(const void *)(right + LANES * v);
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                all[r][v] = QS_NAME(fused)(all[r][v], left[r * row], values[v]);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            *(floats *)(void *)(sums[r] + LANES * v) = all[r][v];
}

/* A matrix given by columns: element [row][column] is rows[column * stride + row]. */
static void QS_NAME(pack_turned)(const float *rows, int64_t stride, int32_t count, int32_t columns, float *packed)
{
    memset(packed, 0, sizeof(float) * (size_t)count * PANEL);
    for (int32_t first = 0; first < columns; first += 8) { /* eight streams stay in the first cache */
        int32_t some = columns - first < 8 ? columns - first : 8;
        for (int32_t k = 0; k < count; k++)
            for (int32_t c = first; c < first + some; c++)
                packed[(int64_t)k * PANEL + c] = rows[c * stride + k];
    }
}

/* Row after row across all panels, so that memory is read in one stream. */
static void QS_NAME(pack)(const qs_pack *op, int32_t first, int32_t panels)
{
    int32_t start = first * PANEL, stop = (first + panels) * PANEL < op->width ? (first + panels) * PANEL : op->width;
    int64_t size = (int64_t)op->count * PANEL;
    float *packed = (float *)op->packed + first * size;
    const float *row = op->rows;
    if (op->turned) {
        for (int32_t c = start; c < stop; c += PANEL, packed += size)
            QS_NAME(pack_turned)(row + c * op->stride, op->stride, op->count, stop - c < PANEL ? stop - c : PANEL, packed);
        return;
    }
    for (int32_t k = 0; k < op->count; k++, row += op->stride, packed += PANEL) {
        float *to = packed;
        int32_t c = start;
        for (; c + PANEL <= stop; c += PANEL, to += size)
            memcpy(to, row + c, sizeof(float) * PANEL);
        for (int32_t last = 0; c < stop && last < PANEL; last++)
            to[last] = c + last < stop ? row[c + last] : 0.0f;
        for (c = start; op->absmax && c < stop; c++) {
            float magnitude = fabsf(row[c]), most = op->absmax[c];
            op->absmax[c] = most > magnitude ? most : magnitude;
            op->abssum[c] += magnitude;
        }
    }
}

/* The next lines of a panel come from far and lie apart; only this fetches them in time. */
INLINE void QS_NAME(fetch)(const float *panel, int32_t first, int32_t lines)
{
    for (int32_t line = first; line < first + lines; line++)
        __builtin_prefetch(panel + 16 * line);
}

static void QS_NAME(add_tile)(const qs_moment *op, int32_t i, int32_t j)
{
    enum { LINES = STEP * PANEL / 16, BLOCKS = PANEL / ROWS * (PANEL / WIDE), SHARE = (LINES + BLOCKS - 1) / BLOCKS };
    int32_t height = op->height - i * PANEL, width = op->width - j * PANEL;
    const float *left = (const float *)op->left + (int64_t)i * PANEL * op->count;
    const float *right = (const float *)op->right + (int64_t)j * PANEL * op->count;
    float sums[ROWS][WIDE];
    for (int32_t from = 0; from < op->count; from += STEP, left += STEP * PANEL, right += STEP * PANEL) {
        int32_t count = op->count - from < STEP ? op->count - from : STEP, line = 0;
        float keep = from ? 1.0f : op->keep;
        for (int32_t c = 0; c < PANEL && c < width; c += WIDE)
            for (int32_t r = 0; r < PANEL && r < height; r += ROWS, line += SHARE) {
                QS_NAME(fetch)(left + STEP * PANEL, line, SHARE);
                QS_NAME(fetch)(right + STEP * PANEL, line, SHARE);
                QS_NAME(block)(left + r, 1, PANEL, right + c, count, sums);
                float *out = op->out + (int64_t)(i * PANEL + r) * op->width + j * PANEL + c;
                int32_t rows = height - r < ROWS ? height - r : ROWS, columns = width - c < WIDE ? width - c : WIDE;
                for (int32_t m = 0; m < rows; m++, out += op->width)
                    for (int32_t n = 0; n < columns; n++)
                        out[n] = keep * out[n] + op->gain * sums[m][n];
            }
    }
}

static void QS_NAME(add_tiles)(const qs_moment *op, int32_t i, int32_t j, int32_t end)
{
    for (; j < end; j++)
        QS_NAME(add_tile)(op, i, j);
}

/* Some rows by all columns of a packed matrix. If fewer rows than ROWS are left, each is multiplied alone. */
static void QS_NAME(multiply)(const qs_product *op, int32_t first, int32_t rows)
{
    enum { SHARE = (LONG_STEP * WIDE / 16 * ROWS + QS_CHUNK - 1) / QS_CHUNK };
    float sums[ROWS][WIDE];
    for (int32_t column = 0; column < op->outputs; column += WIDE) {
        int32_t columns = op->outputs - column < WIDE ? op->outputs - column : WIDE;
        const float *panel = op->weight + (int64_t)(column / PANEL) * PANEL * op->inputs + column % PANEL;
        for (int32_t from = 0; from < op->inputs; from += LONG_STEP, panel += LONG_STEP * PANEL) {
            int32_t count = op->inputs - from < LONG_STEP ? op->inputs - from : LONG_STEP, line = 0;
            for (int32_t row = first, some; row < first + rows; row += some, line += SHARE) {
                const float *x = op->x + (int64_t)row * op->stride + from;
                some = first + rows - row < ROWS ? 1 : ROWS;
                for (int32_t k = line; k < line + SHARE; k++)
                    __builtin_prefetch(panel + (LONG_STEP + k) * PANEL);
                QS_NAME(block)(x, some == 1 ? 0 : op->stride, 1, panel, count, sums);
                float *out = op->out + (int64_t)row * op->outputs + column;
                for (int32_t m = 0; m < some; m++, out += op->outputs)
                    for (int32_t n = 0; n < columns; n++)
                        out[n] = sums[m][n] + (from ? out[n] : op->bias ? op->bias[column + n] : 0.0f);
            }
        }
    }
}

/* e^x for x <= 0, to 3e-7. Below e^-87 it is zero; NaN stays NaN. */
INLINE float QS_NAME(exponential)(float x)
{
    const float big = 12582912.0f; /* adding it rounds to an integer, held in the last bits */
    union { float f; uint32_t u; } shifted, power;
    float steps = x * 1.44269504088896341f;
    steps = steps < -127.0f ? -127.0f : steps;
    shifted.f = steps + big;
    power.u = (shifted.u + 127u) << 23;
    float r = steps - (shifted.f - big), p = 1.5403530e-4f;
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    return p * power.f;
}

/* The scores of one query, `seen` of them, become their exponentials. Returns the sum. */
static float QS_NAME(weigh)(float *scores, int32_t seen)
{
    float tops[16], top = scores[0], total = 0;
    for (int32_t lane = 0; lane < 16; lane++)
        tops[lane] = top;
    for (int32_t j = 0; j + 16 <= seen; j += 16)
        for (int32_t lane = 0; lane < 16; lane++)
            tops[lane] = scores[j + lane] > tops[lane] ? scores[j + lane] : tops[lane];
    for (int32_t lane = 0; lane < 16; lane++)
        top = tops[lane] > top ? tops[lane] : top;
    for (int32_t j = seen / 16 * 16; j < seen; j++)
        top = scores[j] > top ? scores[j] : top;
#pragma omp simd reduction(+ : total)
    for (int32_t j = 0; j < seen; j++) {
        scores[j] = QS_NAME(exponential)(scores[j] - top);
        total += scores[j];
    }
    return total;
}

/* QUERIES queries [QUERIES][head_dim] from `first` on; some may lie behind the last token. This many share keys and
 * values in the first cache. scores [QUERIES][padded], mixed [QUERIES][wide]. */
static void QS_NAME(attend_some)(const qs_causal *op, const float *queries, int32_t first, const float *keys,
                                 const float *values, float *scores, float *mixed, float *out)
{
    int32_t dim = op->head_dim, end = first + QUERIES < op->tokens ? first + QUERIES : op->tokens;
    int32_t padded = (op->tokens + PANEL - 1) / PANEL * PANEL, wide = (dim + PANEL - 1) / PANEL * PANEL;
    float sums[ROWS][WIDE], inverse[QUERIES];
    for (int32_t j = 0; j < end; j += WIDE)
        for (int32_t q = 0; q < QUERIES; q += ROWS) {
            QS_NAME(block)(queries + q * dim, dim, 1, keys + (int64_t)(j / PANEL) * PANEL * dim + j % PANEL, dim, sums);
            for (int32_t r = 0; r < ROWS; r++)
                memcpy(scores + (q + r) * padded + j, sums[r], sizeof(sums[r]));
        }
    for (int32_t q = 0; q < QUERIES; q++) {
        int32_t seen = first + q < end ? first + q + 1 : end;
        inverse[q] = 1.0f / QS_NAME(weigh)(scores + q * padded, seen);
        for (int32_t j = seen; j < end; j++) /* later keys are not seen */
            scores[q * padded + j] = 0;
    }
    memset(mixed, 0, sizeof(float) * QUERIES * (size_t)wide);
    for (int32_t from = 0; from < end; from += STEP)
        for (int32_t c = 0; c < dim; c += WIDE)
            for (int32_t q = 0; q < QUERIES; q += ROWS) {
                QS_NAME(block)(scores + q * padded + from, padded, 1,
                               values + ((int64_t)(c / PANEL) * op->tokens + from) * PANEL + c % PANEL,
                               end - from < STEP ? end - from : STEP, sums);
                for (int32_t r = 0; r < ROWS; r++)
                    for (int32_t n = 0; n < WIDE; n++)
                        mixed[(q + r) * wide + c + n] += sums[r][n];
            }
    for (int32_t q = 0; q < end - first; q++)
        for (int32_t d = 0; d < dim; d++)
            out[(int64_t)(first + q) * op->heads * dim + d] = mixed[q * wide + d] * inverse[q];
}

static int32_t QS_NAME(attend)(const qs_causal *op, int64_t from, int64_t items)
{
    int32_t group = op->heads / op->kv_heads, dim = op->head_dim, tokens = op->tokens;
    size_t padded = (size_t)(tokens + PANEL - 1) / PANEL * PANEL, wide = (size_t)(dim + PANEL - 1) / PANEL * PANEL;
    float *scores = calloc((QUERIES + (size_t)dim) * padded + (QUERIES + (size_t)tokens) * wide + QUERIES * (size_t)dim,
                           sizeof(float));
    if (!scores)
        return -2;
    float *keys = scores + QUERIES * padded, *mixed = keys + padded * (size_t)dim, *values = mixed + QUERIES * wide;
    float *queries = values + wide * (size_t)tokens;
    for (int64_t item = from; item < from + items; item++) {
        int64_t batch = item / op->kv_heads, kv_head = item % op->kv_heads;
        qs_pack rows = {.rows = (const float *)op->keys.at + batch * op->keys.batch + kv_head * op->keys.head,
                        .packed = keys, .stride = op->keys.token, .count = dim, .width = tokens, .turned = 1};
        QS_NAME(pack)(&rows, 0, (tokens + PANEL - 1) / PANEL);
        rows = (qs_pack){.rows = (const float *)op->values.at + batch * op->values.batch + kv_head * op->values.head,
                         .packed = values, .stride = op->values.token, .count = tokens, .width = dim};
        QS_NAME(pack)(&rows, 0, (dim + PANEL - 1) / PANEL);
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
            const float *head = (const float *)op->queries.at + batch * op->queries.batch + h * op->queries.head;
            float *out = (float *)op->out + (batch * tokens * op->heads + h) * dim;
            for (int32_t first = 0; first < tokens; first += QUERIES) {
                for (int32_t q = 0; q < QUERIES && first + q < tokens; q++)
                    for (int32_t d = 0; d < dim; d++)
                        queries[q * dim + d] = op->scale * head[(first + q) * op->queries.token + d];
                QS_NAME(attend_some)(op, queries, first, keys, values, scores, mixed, out);
            }
        }
    }
    free(scores);
    return 0;
}

const qs_products QS_TABLE = {
    .pack = QS_NAME(pack),
    .add_tiles = QS_NAME(add_tiles),
    .attend = QS_NAME(attend),
    .multiply = QS_NAME(multiply),
};

#undef QS_NAME
#undef QS_TABLE
#undef LANES
#undef VECTORS
#undef ROWS
#undef WIDE
