/* How the attention of a step is shared out, behind the products of program.c: by sequence, by tokens, by key heads.
 * Neighbouring sequences that begin with the same KV blocks go through these together. */

#define BLOCK 16     /* tokens of a KV block */
#define MIN_SHARED 4 /* blocks: with fewer, sequences are attended one by one */

/* Whether operation i is a rotation that the attention behind it can do itself. It can if every sequence has one token,
 * a key head one piece, and each head its own norm: then no piece needs keys or queries of another. */
static int is_joined(const struct job *job, int32_t i)
{
    const qs_op *op = job->ops + i;
    return i + 1 < job->count && op[0].kind == QS_ROPE_KV && op[1].kind == QS_ATTENTION &&
           job->step->tokens == job->step->sequences && !op[0].rope_kv.norm_over_heads &&
           op[1].attention.heads <= op[1].attention.kv_heads * QS_MAX_QUERY_ROWS;
}

/* How many sequences from `sequence` on, with one token each, are attended together: as many as make full query rows
 * and begin with the same blocks. `shared`: the number of these, which all queries see as a whole. */
static int32_t alike(const qs_step *step, const qs_attention *op, int32_t sequence, int32_t most, int32_t *shared)
{
    const int32_t *table = step->block_tables + (int64_t)sequence * step->table_stride, *start = step->seq_start + sequence;
    int32_t count = 1;
    *shared = 0;
    if (op->window > 0 || start[1] - start[0] != 1)
        return 1;
    for (; count < most && sequence + count < step->sequences && start[count + 1] - start[count] == 1; count++) {
        const int32_t *other = table + (int64_t)count * step->table_stride;
        int32_t here = step->positions[start[0]] / BLOCK, there = step->positions[start[count]] / BLOCK;
        int32_t whole = here < there ? here : there, same = 0;
        whole = count > 1 && *shared < whole ? *shared : whole;
        while (same < whole && other[same] == table[same])
            same++;
        if (same < MIN_SHARED || same < *shared / 2) /* what the others share is worth more */
            break;
        *shared = same;
    }
    return count;
}

/* Attends with a key head and a few tokens of a sequence: as many as make full query rows. If the query heads of one
 * key head need several parts, `split` is the number of the part. Or with one token of each of `sequences`, which begin
 * with the same `shared` blocks. */
static void attend_tokens(const struct job *job, const qs_attention *op, int32_t sequence, int32_t start, int32_t tokens,
                          int32_t sequences, int32_t shared, int32_t kv_head, int32_t split)
{
    const qs_step *step = job->step;
    int32_t group = op->heads / op->kv_heads, dim = op->head_dim, width = (op->heads + 2 * op->kv_heads) * dim;
    int32_t from = split * QS_MAX_QUERY_ROWS, to = group - from < QS_MAX_QUERY_ROWS ? group : from + QS_MAX_QUERY_ROWS;
    qs_queries queries;
    queries.count = 0;
    queries.shared = shared;
    for (int32_t t = start; t < start + tokens && t < step->seq_start[sequence + sequences]; t++)
        for (int32_t h = from; h < to; h++) {
            int32_t i = queries.count++, head = kv_head * group + h, position = step->positions[t];
            int32_t owner = sequences > 1 ? sequence + t - start : sequence;
            queries.tables[i] = step->block_tables + (int64_t)owner * step->table_stride;
            queries.q[i] = op->qkv + (int64_t)t * width + (int64_t)head * dim;
            queries.out[i] = op->out + (int64_t)t * op->out_stride + (int64_t)head * dim;
            queries.last[i] = position;
            queries.first[i] = op->window > 0 && position >= op->window ? position - op->window + 1 : 0;
            queries.top[i] = op->sinks ? op->sinks[head] : -1e30f;
            queries.total[i] = op->sinks ? 1.0f : 0.0f;
        }
    job->kernels->attend(op, &queries, kv_head);
}

/* A piece is a few tokens of a sequence, or one of each of several that are alike, with one key head; or, where there are
 * enough sequences, with all key heads, whose caches are neighbours. `rope`: to be done first, or NULL. */
static void run_attention(const struct job *job, qs_pool *pool, struct phase *phase, const qs_attention *op,
                          const qs_rope_kv *rope)
{
    const qs_step *step = job->step;
    int32_t group = op->heads / op->kv_heads, width = (op->heads + 2 * op->kv_heads) * op->head_dim;
    int32_t tokens = group < QS_MAX_QUERY_ROWS ? QS_MAX_QUERY_ROWS / group : 1;
    int32_t splits = (group + QS_MAX_QUERY_ROWS - 1) / QS_MAX_QUERY_ROWS;
    int32_t sequence = 0, before = 0, pieces = 0, mine = 0, count = alike(step, op, 0, tokens, &(int32_t){0}), shared = 0;
    int32_t heads = step->sequences / count >= SHARE * pool->threads ? op->kv_heads : 1, times = op->kv_heads / heads;
    count = 0;
    for (int32_t piece;; mine++) {
        piece = take(phase);
        for (; sequence < step->sequences; sequence += count, before += pieces, count = 0) {
            if (count == 0)
                count = alike(step, op, sequence, tokens, &shared);
            int32_t length = step->seq_start[sequence + 1] - step->seq_start[sequence];
            pieces = (length + tokens - 1) / tokens * times * splits; /* one part where they are alike */
            if (piece < before + pieces)
                break;
        }
        if (sequence == step->sequences)
            break;
        int32_t at = piece - before, first = at % times * heads, split = at / times % splits;
        int32_t start = step->seq_start[sequence] + at / times / splits * tokens;
        for (int32_t kv_head = first; kv_head < first + heads; kv_head++) {
            for (int32_t t = start; rope && t < start + count; t++)
                job->kernels->rope_kv(rope, rope->qkv + (int64_t)t * width, step->positions[t], step->slots[t], kv_head);
            attend_tokens(job, op, sequence, start, tokens, count, shared, kv_head, split);
        }
    }
    settle(pool, phase, before, mine); /* pieces of all sequences: none is left to take */
}
