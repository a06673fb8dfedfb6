/* Attention over vectors, behind rows.h. An ISA defines ATTEND_ROWS(X) = X(n) for each number of query rows that are
 * computed together, the largest first and 1 last: as many as have accumulators in registers. */

/* A query row and what it has gathered so far: sums = the weighted values, and their total weight, both relative to the
 * highest score `top`. The distance between rows is known at compile time: a pointer to each would take a register
 * each. */
typedef struct {
    float q[256], sums[256], weights[QS_LANES], total[QS_LANES], lows[QS_LANES];
    float top, q_total; /* q_total and lows: of a cache whose numbers are low + step * code */
    uint32_t seen; /* a bit for each token of a block */
} query_row;

/* Cached values before their scale; those of f8 are a 256th. Codes of u4 begin at bit `shift` of their bytes. */
INLINE vf load_kv(const void *cache, int64_t at, int32_t shift, const int dtype)
{
    if (dtype == QS_U4)
        return floats_of(load_unsigned((const uint8_t *)cache + at) >> shift & 15);
    if (dtype == QS_I8) {
        vf value = load_bytes((const int8_t *)cache + at);
        return nan_where(value, value, all(-128.0f));
    }
    if (dtype == QS_F8) {
        vf value = load_e4m3((const uint8_t *)cache + at), size = higher(value, all(0.0f) - value);
        return nan_where(value, size, all(480.0f / 256)); /* the value that the bits of NaN read as */
    }
    return load_floats(cache, at, dtype);
}

/* The steps of the tokens of a block, and PARTS behind them their lows. */
INLINE vf load_steps(const void *block, int32_t dim, int part)
{
    return load_halves((const uint16_t *)(const void *)((const uint8_t *)block + (int64_t)dim / 2 * QS_LANES) + part * LANES);
}

/* What the codes of values gave, and behind it what their lows did. */
INLINE vf with_lows(vf sums, float lows, int32_t dtype)
{
    return dtype == QS_U4 ? sums + all(lows) : sums;
}

/* The weighted values of one block. `every`: all rows see all values from begin to end. The last values of an odd
 * head_dim are copied, because a vector of them would reach behind the cache. */
INLINE void add_values(query_row *rows, const void *values, int32_t dim, int32_t begin, int32_t end, const int every,
                       const int R, const int dtype)
{
    const int32_t bytes = dtype == QS_F32 ? 4 : dtype == QS_F16 || dtype == QS_BF16 ? 2 : 1;
    for (int32_t j = 0; j < dim; j += QS_LANES) {
        vf sums[QS_MAX_QUERY_ROWS][PARTS], value[PARTS];
        uint8_t last[QS_LANES * QS_LANES * 4];
        const void *from = values;
        int64_t at = j, stride = dim;
        int32_t shift = 0;
        if (dtype == QS_U4) {
            stride = dim / 2;
            shift = j < stride ? 0 : 4;
            at = j % stride;
        } else if (dim - j < QS_LANES) {
            memset(last, 0, sizeof last);
            for (int32_t i = begin; i <= end; i++)
                memcpy(last + i * QS_LANES * bytes, (const uint8_t *)values + (at + i * dim) * bytes,
                       (size_t)((dim - j) * bytes));
            from = last;
            at = 0;
            stride = QS_LANES;
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int p = 0; p < PARTS; p++)
                sums[r][p] = load(rows[r].sums + j + p * LANES);
        for (int32_t i = begin; i <= end; i++) {
            UNROLL for (int p = 0; p < PARTS; p++)
                value[p] = load_kv(from, at + i * stride + p * LANES, shift, dtype);
            UNROLL for (int r = 0; r < R; r++)
                if (every || (rows[r].seen >> i & 1)) /* values that a row does not see may be infinite */
                    UNROLL for (int p = 0; p < PARTS; p++)
                        sums[r][p] = fused(all(rows[r].weights[i]), value[p], sums[r][p]);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int p = 0; p < PARTS; p++)
                store(rows[r].sums + j + p * LANES, sums[r][p]);
    }
}

/* Raises `top` to the highest of the `risen` scores, and rescales what was gathered relative to the old one. */
INLINE void raise_top(query_row *rows, vf scores[][PARTS], const uint32_t *risen, int32_t dim, const int R, const int dtype)
{
    float shrink[QS_LANES] = {0};
    UNROLL for (int r = 0; r < R; r++) {
        float best = rows[r].top;
        UNROLL for (int p = 0; p < PARTS; p++) {
            float part = highest(chosen(risen[r] >> p * LANES, scores[r][p], all(-INFINITY)));
            best = part > best ? part : best;
        }
        shrink[r] = rows[r].top - best;
        rows[r].top = best;
    }
    UNROLL for (int i = 0; i < R; i += LANES)
        store(shrink + i, exp_lanes(load(shrink + i)));
    UNROLL for (int r = 0; r < R; r++) {
        if (!risen[r])
            continue;
        for (int32_t j = 0; j < QS_LANES; j += LANES)
            store(rows[r].total + j, load(rows[r].total + j) * all(shrink[r]));
        for (int32_t j = 0; dtype == QS_U4 && j < QS_LANES; j += LANES)
            store(rows[r].lows + j, load(rows[r].lows + j) * all(shrink[r]));
        for (int32_t j = 0; j < dim; j += LANES)
            store(rows[r].sums + j, load(rows[r].sums + j) * all(shrink[r]));
    }
}

/* By way of memory, so that the scores of models without a soft cap stay in registers. */
INLINE void cap_scores(vf scores[][PARTS], float cap, const int R)
{
    float capped_scores[QS_MAX_QUERY_ROWS * QS_LANES] __attribute__((aligned(64)));
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < PARTS; p++)
            store(capped_scores + r * QS_LANES + p * LANES, scores[r][p]);
    soft_cap(capped_scores, R * QS_LANES, cap);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < PARTS; p++)
            scores[r][p] = load(capped_scores + r * QS_LANES + p * LANES);
}

/* What element j of the queries and of 16 keys adds to their scores. */
INLINE void add_scores(vf scores[][PARTS], const query_row *rows, const vf *key, int32_t j, const int R)
{
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < PARTS; p++)
            scores[r][p] = fused(all(rows[r].q[j]), key[p], scores[r][p]);
}

/* A block of 16 tokens; vectors of scores hold all of them: no horizontal sums. Every row sees the tokens from begin to
 * end where `every`, else those of `seen`. `base` and `next` in bytes: this block, and the one that is fetched. */
INLINE void attend_block(const qs_attention *op, query_row *rows, int64_t base, int64_t next, float k_scale,
                         int32_t begin, int32_t end, int32_t every, const int R, const int dtype)
{
    const int32_t dim = op->head_dim, lines = dtype == QS_U4 ? dim / 2 : dim; /* of 16 keys */
    const int32_t bytes = (dtype == QS_F32 ? 4 : dtype == QS_F16 || dtype == QS_BF16 ? 2 : 1) * QS_LANES;
    const char *keys = (const char *)op->k_cache + base, *values = (const char *)op->v_cache + base;
    vf scores[QS_MAX_QUERY_ROWS][PARTS], key[PARTS];
    uint32_t risen[QS_MAX_QUERY_ROWS], any = 0;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < PARTS; p++)
            scores[r][p] = all(0.0f);
    for (int32_t j = 0; j < lines; j++) {
        UNROLL for (int p = 0; p < PARTS; p++)
            key[p] = load_kv(keys, j * QS_LANES + p * LANES, 0, dtype);
        if (R <= 4) { /* more rows take so long that the processor prefetches by itself */
            __builtin_prefetch((const char *)op->k_cache + next + j * bytes, 0, 2);
            __builtin_prefetch((const char *)op->v_cache + next + j * bytes, 0, 2);
        }
        add_scores(scores, rows, key, j, R);
        if (dtype == QS_U4) {
            UNROLL for (int p = 0; p < PARTS; p++)
                key[p] = load_kv(keys, j * QS_LANES + p * LANES, 4, dtype);
            add_scores(scores, rows, key, j + lines, R);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < PARTS; p++) {
            if (dtype == QS_U4) {
                vf low = load_steps(keys, dim, PARTS + p) * all(rows[r].q_total);
                scores[r][p] = fused(load_steps(keys, dim, p), scores[r][p], low);
            }
            scores[r][p] = scores[r][p] * all(k_scale);
        }
    if (op->softcap != 0.0f)
        cap_scores(scores, op->softcap, R);
    UNROLL for (int r = 0; r < R; r++) {
        risen[r] = 0;
        UNROLL for (int p = 0; p < PARTS; p++)
            risen[r] |= above(scores[r][p], all(rows[r].top)) << p * LANES;
        any |= risen[r] &= every ? 0xffff : rows[r].seen;
    }
    if (any)
        raise_top(rows, scores, risen, dim, R, dtype);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < PARTS; p++) {
            float *total = rows[r].total + p * LANES, *lows = rows[r].lows + p * LANES;
            vf weight = exp_lanes(scores[r][p] - all(rows[r].top));
            if (!every)
                weight = chosen(rows[r].seen >> p * LANES, weight, all(0.0f));
            store(total, load(total) + weight);
            if (dtype == QS_U4) { /* the step and the low of a token that a row does not see may be infinite */
                vf step = load_steps(values, dim, p), low = load_steps(values, dim, PARTS + p);
                if (!every) {
                    step = chosen(rows[r].seen >> p * LANES, step, all(0.0f));
                    low = chosen(rows[r].seen >> p * LANES, low, all(0.0f));
                }
                store(lows, fused(weight, low, load(lows)));
                weight = weight * step;
            }
            store(rows[r].weights + p * LANES, weight);
        }
    if (every)
        add_values(rows, values, dim, 0, QS_LANES - 1, 1, R, dtype);
    else
        add_values(rows, values, dim, begin, end, 0, R, dtype);
}

#define ATTEND_AS(R, dtype)                                                                                       \
    static void attend_##R##_##dtype(const qs_attention *op, query_row *rows, int64_t base, int64_t next,         \
                                     float k_scale, int32_t begin, int32_t end, int32_t every)                    \
    {                                                                                                             \
        attend_block(op, rows, base, next, k_scale, begin, end, every, R, dtype);                                \
    }
#define ATTEND(R)                                                                                     \
    ATTEND_AS(R, QS_F32) ATTEND_AS(R, QS_F16) ATTEND_AS(R, QS_BF16) ATTEND_AS(R, QS_F8) ATTEND_AS(R, QS_I8) \
    ATTEND_AS(R, QS_U4)
ATTEND_ROWS(ATTEND)

/* For each row, the tokens of the block from `token` on that it sees. Returns whether all rows see all of it. */
static int find_seen(query_row *rows, const qs_queries *queries, int32_t row, int32_t count, int32_t token)
{
    uint32_t common = 0xffff;
    for (int r = 0; r < count; r++) {
        int32_t lo = queries->first[row + r] - token, hi = queries->last[row + r] - token;
        uint32_t upto = hi < 0 ? 0 : hi > 15 ? 0xffffu : (1u << (hi + 1)) - 1;
        common &= rows[r].seen = upto & ~(lo <= 0 ? 0 : lo > 15 ? 0xffffu : (1u << lo) - 1);
    }
    return common == 0xffff;
}

/* The blocks from `start` to `stop` for the rows from `row` on, whose tables name the same ones. */
static void attend_blocks(const qs_attention *op, const qs_queries *queries, query_row *rows, int32_t row, int32_t count,
                          int32_t start, int32_t stop, float k_scale, int32_t kv_head)
{
    static const struct {
        int32_t rows;
        void (*by_dtype[QS_I8 + 1])(const qs_attention *, query_row *, int64_t, int64_t, float, int32_t, int32_t, int32_t);
    } kernels[] = {
#define BY_DTYPE(R)                                                                                               \
    {R, {[QS_F32] = attend_##R##_QS_F32, [QS_F16] = attend_##R##_QS_F16, [QS_BF16] = attend_##R##_QS_BF16,        \
         [QS_F8] = attend_##R##_QS_F8, [QS_I8] = attend_##R##_QS_I8, [QS_U4] = attend_##R##_QS_U4}},
        ATTEND_ROWS(BY_DTYPE)
    };
    const int32_t *table = queries->tables[row];
    const int64_t bytes = qs_kv_bytes(op->kv_dtype, op->head_dim);
    int32_t from = queries->first[row], to = queries->last[row];
    for (int32_t r = row; r < row + count; r++) {
        from = queries->first[r] < from ? queries->first[r] : from;
        to = queries->last[r] > to ? queries->last[r] : to;
    }
    start = start < from / QS_LANES ? from / QS_LANES : start;
    stop = stop > to / QS_LANES ? to / QS_LANES : stop;
    for (int32_t block = start; block <= stop; block++) {
        const int32_t token = block * QS_LANES, begin = from > token ? from - token : 0;
        const int32_t end = to < token + QS_LANES - 1 ? to - token : QS_LANES - 1;
        const int32_t every = find_seen(rows, queries, row, count, token);
        int64_t base = ((int64_t)table[block] * op->kv_heads + kv_head) * bytes;
        /* Fetch what comes next meanwhile: the next block, or the first one of the next head. */
        int64_t next = block < stop ? ((int64_t)table[block + 1] * op->kv_heads + kv_head) * bytes
                                    : ((int64_t)table[start] * op->kv_heads + kv_head + 1) * bytes;
        for (int32_t at = 0, i = 0; at < count; at += kernels[i].rows) {
            while (kernels[i].rows > count - at)
                i++;
            kernels[i].by_dtype[op->kv_dtype](op, rows + at, base, next, k_scale, begin, end, every);
        }
    }
}

/* Rows of several sequences go through the blocks that they share together: a block is loaded once for all, and there
 * is more to do while a sum waits for the one before. Every row adds up its own blocks in the same order. */
static void attend(const qs_attention *op, const qs_queries *queries, int32_t kv_head)
{
    const int32_t dim = op->head_dim, rows = queries->count;
    const float lift = op->kv_dtype == QS_F8 ? 256.0f : 1.0f;
    const float k_scale = op->scale * (op->k_scale ? op->k_scale[kv_head] * lift : 1.0f);
    const float v_scale = op->v_scale ? op->v_scale[kv_head] * lift : 1.0f;
    query_row at[QS_MAX_QUERY_ROWS] __attribute__((aligned(64)));
    for (int r = 0; r < rows; r++) {
        memcpy(at[r].q, queries->q[r], sizeof(float) * (size_t)dim);
        memset(at[r].sums, 0, sizeof at[r].sums);
        memset(at[r].total, 0, sizeof at[r].total);
        memset(at[r].lows, 0, sizeof at[r].lows);
        at[r].q_total = op->kv_dtype == QS_U4 ? total_of(at[r].q, dim, 0.0f, 0) : 0.0f;
        at[r].top = queries->top[r];
        at[r].total[0] = queries->total[r];
    }
    if (queries->shared)
        attend_blocks(op, queries, at, 0, rows, 0, queries->shared - 1, k_scale, kv_head);
    for (int32_t row = 0, end; row < rows; row = end) {
        for (end = row + 1; end < rows && queries->tables[end] == queries->tables[row]; end++)
            ;
        attend_blocks(op, queries, at + row, row, end - row, queries->shared, INT32_MAX, k_scale, kv_head);
    }
    for (int r = 0; r < rows; r++) {
        vf parts[PARTS], lows[PARTS];
        UNROLL for (int p = 0; p < PARTS; p++) {
            parts[p] = load(at[r].total + p * LANES);
            lows[p] = load(at[r].lows + p * LANES);
        }
        float total = sum_parts(parts), low = op->kv_dtype == QS_U4 ? sum_parts(lows) : 0.0f;
        int32_t j = 0;
        for (; j + LANES <= dim; j += LANES)
            store(queries->out[r] + j, with_lows(load(at[r].sums + j), low, op->kv_dtype) / all(total) * all(v_scale));
        for (; j < dim; j++)
            queries->out[r][j] = at[r].sums[j] / total * v_scale;
        if (op->kv_dtype == QS_U4)
            QS_NAME(inverse_hadamard)(queries->out[r], dim);
    }
}
