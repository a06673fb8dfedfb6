/* Attention with AVX-512. Included by isa_avx512.c, behind what loads vectors and takes their exponentials. */

/* 16 cached values before their scale; those of f8 are a 256th. */
INLINE __m512 load_kv(const void *cache, int64_t at, const int dtype)
{
    const __m512 nan = _mm512_set1_ps(NAN);
    if (dtype == QS_F32 || dtype == QS_F16 || dtype == QS_BF16)
        return load_floats(cache, at, dtype);
    __m128i codes = _mm_loadu_si128((const __m128i *)((const uint8_t *)cache + at));
    if (dtype == QS_I8)
        return _mm512_mask_mov_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)),
                                  _mm_cmpeq_epi8_mask(codes, _mm_set1_epi8(-128)), nan);
    __mmask16 bad = _mm_cmpeq_epi8_mask(_mm_and_si128(codes, _mm_set1_epi8(0x7f)), _mm_set1_epi8(0x7f));
    return _mm512_mask_mov_ps(small_e4m3(codes), bad, nan);
}

/* R query rows that share a key head, and what they have gathered so far: sums = the weighted values, and their total
 * weight, both relative to the highest score `top`. Rows lie at one distance from each other: a pointer each would need
 * a register each. */
typedef struct {
    float q[QS_MAX_QUERY_ROWS][256];
    float sums[QS_MAX_QUERY_ROWS][256] __attribute__((aligned(64)));
    float weights[QS_MAX_QUERY_ROWS][QS_LANES] __attribute__((aligned(64)));
    float total[QS_MAX_QUERY_ROWS][QS_LANES] __attribute__((aligned(64)));
    float top[QS_LANES] __attribute__((aligned(64)));
    uint32_t seen[QS_MAX_QUERY_ROWS];
} attended;

/* The weighted values of one block. `all`: every row sees every value from begin to end. */
INLINE void add_values(const qs_attention *op, attended *rows, int64_t base, int32_t begin, int32_t end, const int all,
                       const int R)
{
    for (int32_t j = 0; j < op->head_dim; j += QS_LANES) {
        __m512 sum[QS_MAX_QUERY_ROWS];
        UNROLL for (int r = 0; r < R; r++)
            sum[r] = _mm512_load_ps(rows->sums[r] + j);
        for (int32_t i = begin; i <= end; i++) {
            __m512 value = load_kv(op->v_cache, base + (int64_t)i * op->head_dim + j, op->kv_dtype);
            UNROLL for (int r = 0; r < R; r++)
                if (all || (rows->seen[r] >> i & 1)) /* what a row does not see must not touch it: it may be infinite */
                    sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(rows->weights[r][i]), value, sum[r]);
        }
        UNROLL for (int r = 0; r < R; r++)
            _mm512_store_ps(rows->sums[r] + j, sum[r]);
    }
}

/* Raises `top` to the highest of `scores`, and takes what was gathered relative to the old one along. */
INLINE void raise_top(attended *rows, const __m512 *scores, const uint32_t *higher, int32_t dim, const int R)
{
    float best[QS_LANES] __attribute__((aligned(64))), shrink[QS_LANES] __attribute__((aligned(64)));
    _mm512_store_ps(best, _mm512_load_ps(rows->top));
    UNROLL for (int r = 0; r < R; r++)
        if (higher[r])
            best[r] = _mm512_mask_reduce_max_ps((__mmask16)higher[r], scores[r]);
    _mm512_store_ps(shrink, exp_lanes(_mm512_sub_ps(_mm512_load_ps(rows->top), _mm512_load_ps(best))));
    _mm512_store_ps(rows->top, _mm512_load_ps(best));
    UNROLL for (int r = 0; r < R; r++) {
        __m512 by = _mm512_set1_ps(shrink[r]);
        if (!higher[r])
            continue;
        _mm512_store_ps(rows->total[r], _mm512_mul_ps(_mm512_load_ps(rows->total[r]), by));
        for (int32_t j = 0; j < dim; j += QS_LANES)
            _mm512_store_ps(rows->sums[r] + j, _mm512_mul_ps(_mm512_load_ps(rows->sums[r] + j), by));
    }
}

/* A block of 16 tokens at `base` in the caches; a score vector holds all of them: no horizontal sums. Every row sees
 * the tokens from begin to end where `all`, else those of `seen`. What comes `next` is fetched meanwhile. */
INLINE void attend_block(const qs_attention *op, attended *rows, int64_t base, int64_t next, float k_scale,
                         int32_t begin, int32_t end, const int all, const int R)
{
    const int32_t bytes = op->kv_dtype == QS_F32 ? 4 : op->kv_dtype == QS_F16 || op->kv_dtype == QS_BF16 ? 2 : 1;
    const int32_t step = QS_LANES * bytes, dim = op->head_dim;
    const char *next_k = (const char *)op->k_cache + next * bytes, *next_v = (const char *)op->v_cache + next * bytes;
    __m512 scores[QS_MAX_QUERY_ROWS];
    uint32_t higher[QS_MAX_QUERY_ROWS], any = 0;
    UNROLL for (int r = 0; r < R; r++)
        scores[r] = _mm512_setzero_ps();
    for (int32_t j = 0; j < dim; j++) {
        __m512 key = load_kv(op->k_cache, base + (int64_t)j * QS_LANES, op->kv_dtype);
        _mm_prefetch(next_k + j * step, _MM_HINT_T1);
        _mm_prefetch(next_v + j * step, _MM_HINT_T1);
        UNROLL for (int r = 0; r < R; r++)
            scores[r] = _mm512_fmadd_ps(_mm512_set1_ps(rows->q[r][j]), key, scores[r]);
    }
    UNROLL for (int r = 0; r < R; r++) {
        __mmask16 seen = all ? 0xffff : (__mmask16)rows->seen[r];
        scores[r] = _mm512_mul_ps(scores[r], _mm512_set1_ps(k_scale));
        any |= higher[r] = _mm512_mask_cmp_ps_mask(seen, scores[r], _mm512_set1_ps(rows->top[r]), _CMP_GT_OQ);
    }
    if (any)
        raise_top(rows, scores, higher, dim, R);
    UNROLL for (int r = 0; r < R; r++) {
        __m512 weight = exp_lanes(_mm512_sub_ps(scores[r], _mm512_set1_ps(rows->top[r])));
        if (!all)
            weight = _mm512_maskz_mov_ps((__mmask16)rows->seen[r], weight);
        _mm512_store_ps(rows->total[r], _mm512_add_ps(_mm512_load_ps(rows->total[r]), weight));
        _mm512_store_ps(rows->weights[r], weight);
    }
    add_values(op, rows, base, begin, end, all, R);
}

INLINE void attend_rows(const qs_attention *op, const qs_queries *queries, int32_t first_row,
                        const int32_t *block_table, int32_t kv_head, const int R)
{
    const int32_t dim = op->head_dim, *first = queries->first + first_row, *last = queries->last + first_row;
    const float lift = op->kv_dtype == QS_F8 ? 256.0f : 1.0f;
    const float k_scale = op->scale * (op->k_scale ? op->k_scale[kv_head] * lift : 1.0f);
    const float v_scale = op->v_scale ? op->v_scale[kv_head] * lift : 1.0f;
    int32_t from = first[0], to = last[0], all_from = first[0], all_to = last[0];
    attended rows;
    _mm512_store_ps(rows.top, _mm512_set1_ps(-1e30f));
    for (int r = 0; r < R; r++) {
        memcpy(rows.q[r], queries->q[first_row + r], sizeof(float) * (size_t)dim);
        memset(rows.sums[r], 0, sizeof(float) * (size_t)dim);
        _mm512_store_ps(rows.total[r], _mm512_setzero_ps());
        from = first[r] < from ? first[r] : from;
        to = last[r] > to ? last[r] : to;
        all_from = first[r] > all_from ? first[r] : all_from;
        all_to = last[r] < all_to ? last[r] : all_to;
    }
    const int32_t start = from / QS_LANES, stop = to / QS_LANES;
    for (int32_t block = start; block <= stop; block++) {
        const int32_t token = block * QS_LANES;
        int64_t base = ((int64_t)block_table[block] * op->kv_heads + kv_head) * dim * QS_LANES;
        /* A block further, or the first one of the next head. */
        int64_t next = block < stop ? ((int64_t)block_table[block + 1] * op->kv_heads + kv_head) * dim * QS_LANES
                                    : ((int64_t)block_table[start] * op->kv_heads + kv_head + 1) * dim * QS_LANES;
        if (token >= all_from && token + QS_LANES - 1 <= all_to) {
            attend_block(op, &rows, base, next, k_scale, 0, QS_LANES - 1, 1, R);
            continue;
        }
        for (int r = 0; r < R; r++) {
            int32_t lo = first[r] - token, hi = last[r] - token;
            uint32_t upto = hi < 0 ? 0 : (hi > 15 ? 0xffffu : (1u << (hi + 1)) - 1);
            rows.seen[r] = upto & ~(lo <= 0 ? 0 : (lo > 15 ? 0xffffu : (1u << lo) - 1));
        }
        attend_block(op, &rows, base, next, k_scale, from > token ? from - token : 0,
                     to < token + QS_LANES - 1 ? to - token : QS_LANES - 1, 0, R);
    }
    for (int r = 0; r < R; r++) {
        __m512 all = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_load_ps(rows.total[r])));
        for (int32_t j = 0; j < dim; j += QS_LANES)
            _mm512_storeu_ps(queries->out[first_row + r] + j,
                             _mm512_mul_ps(_mm512_div_ps(_mm512_load_ps(rows.sums[r] + j), all),
                                           _mm512_set1_ps(v_scale)));
    }
}

#define ATTEND(R)                                                                                                 \
    static void attend_##R(const qs_attention *op, const qs_queries *queries, int32_t row, const int32_t *table,  \
                           int32_t kv_head)                                                                       \
    {                                                                                                             \
        attend_rows(op, queries, row, table, kv_head, R);                                                         \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)
ATTEND(6)
ATTEND(12)

static void attend(const qs_attention *op, const qs_queries *queries, const int32_t *block_table, int32_t kv_head)
{
    for (int32_t row = 0; row < queries->count;) {
        int32_t left = queries->count - row;
        int32_t take = left >= 12 ? 12 : left >= 6 ? 6 : left >= 4 ? 4 : left;
        (take == 12 ? attend_12 : take == 6 ? attend_6 : take == 4 ? attend_4 : take == 3 ? attend_3
         : take == 2 ? attend_2 : attend_1)(op, queries, row, block_table, kv_head);
        row += take;
    }
}
