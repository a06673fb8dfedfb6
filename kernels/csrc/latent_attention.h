/* How attention over latents is shared out, behind the products of program.c. */

static int64_t latent_bytes(void)
{
    return QS_LATENT_BYTES + align64(sizeof(qs_latent_state) * QS_LATENT_GROUPS);
}

static int64_t latent_slots(void)
{
    return align64(sizeof(qs_latent_state) * QS_LATENT_SLOTS);
}

/* The query rows of a sequence of the step: `groups` of QS_LANES, and the chunks of keys that they see. */
static qs_latent_rows rows_of(const qs_step *step, const qs_latent_attention *op, int32_t sequence, int32_t *groups,
                              int32_t *chunks)
{
    int32_t start = step->seq_start[sequence], tokens = step->seq_start[sequence + 1] - start;
    qs_latent_rows rows = {.q = op->q + (int64_t)start * op->heads * op->width,
                           .out = op->out + (int64_t)start * op->heads * op->rank,
                           .table = step->block_tables + (int64_t)sequence * step->table_stride,
                           .position = step->positions[start], .count = tokens * op->heads};
    *groups = (rows.count + QS_LANES - 1) / QS_LANES;
    *chunks = (step->positions[start] + tokens - 1) / QS_LATENT_CHUNK + 1;
    return rows;
}

/* The groups first .. first + some - 1 of `rows`. */
static qs_latent_rows some_of(qs_latent_rows rows, int32_t first, int32_t some)
{
    int32_t left = rows.count - first * QS_LANES;
    rows.first = first * QS_LANES;
    rows.count = left < some * QS_LANES ? left : some * QS_LANES;
    return rows;
}

/* A piece is some groups of query rows of a sequence. Where there are few, it is one group with one chunk of the keys,
 * and a second phase joins the chunks: the sums are the same. */
static void run_latent_attention(const struct job *job, qs_pool *pool, int32_t thread, struct phase *phase,
                                 const qs_latent_attention *op)
{
    const qs_step *step = job->step;
    uint8_t *own = job->scratch + thread_bytes(&job->layout) * thread;
    qs_latent_state *states = (qs_latent_state *)(own + QS_LATENT_BYTES);
    qs_latent_state *slots = (qs_latent_state *)(job->scratch + thread_bytes(&job->layout) * pool->threads);
    int32_t groups, chunks, all_groups = 0, all_chunks = 0, mine = 0, before = 0;
    for (int32_t s = 0; s < step->sequences; s++) {
        rows_of(step, op, s, &groups, &chunks);
        all_groups += groups;
        all_chunks += groups * chunks;
    }
    int32_t apart = all_groups < SHARE * pool->threads && all_chunks > all_groups && all_chunks <= QS_LATENT_SLOTS;
    int32_t some = all_groups / (2 * pool->threads);
    some = some < 1 ? 1 : some < QS_LATENT_GROUPS ? some : QS_LATENT_GROUPS;
    int32_t ticket = take(phase);
    for (int32_t s = 0; s < step->sequences; s++) {
        qs_latent_rows rows = rows_of(step, op, s, &groups, &chunks);
        int32_t pieces = apart ? groups * chunks : (groups + some - 1) / some;
        for (; ticket < before + pieces; ticket = take(phase), mine++) {
            int32_t piece = ticket - before;
            if (apart) {
                qs_latent_rows part = some_of(rows, piece / chunks, 1);
                job->kernels->attend_latent(op, &part, piece % chunks, piece % chunks + 1, slots + ticket, own);
                continue;
            }
            qs_latent_rows part = some_of(rows, piece * some, some);
            int32_t final = rows.position + (part.first + part.count - 1) / op->heads;
            job->kernels->attend_latent(op, &part, 0, final / QS_LATENT_CHUNK + 1, states, own);
            for (int32_t g = 0; g * QS_LANES < part.count; g++) {
                qs_latent_rows group = some_of(rows, piece * some + g, 1);
                job->kernels->finish_latent(op, &group, states + g, 1);
            }
        }
        before += pieces;
    }
    settle(pool, phase, before, mine);
    if (!apart)
        return;
    mine = before = all_chunks = 0;
    ticket = take(phase + 1);
    for (int32_t s = 0; s < step->sequences; s++) {
        qs_latent_rows rows = rows_of(step, op, s, &groups, &chunks);
        for (; ticket < before + groups; ticket = take(phase + 1), mine++) {
            qs_latent_rows part = some_of(rows, ticket - before, 1);
            job->kernels->finish_latent(op, &part, slots + all_chunks + (ticket - before) * chunks, chunks);
        }
        before += groups;
        all_chunks += groups * chunks;
    }
    settle(pool, phase + 1, before, mine);
}

/* A piece is some tiles of the product of a head, for a part of the rows. */
static void run_head_linear(const struct job *job, qs_pool *pool, struct phase *phase, const qs_head_linear *op,
                            int32_t rows)
{
    const qs_linear *linear = &op->product;
    int32_t tiles = (linear->n + QS_LANES - 1) / QS_LANES, columns = (tiles + TILES - 1) / TILES, mine = 0;
    int32_t most = (rows + PART - 1) / PART, parts = (SHARE * pool->threads + columns * op->heads - 1) / (columns * op->heads);
    parts = parts < most ? parts : most;
    int32_t part = (most + parts - 1) / parts * PART, pieces = columns * op->heads * (parts = (rows + part - 1) / part);
    int64_t size = (int64_t)tiles * linear->k * QS_LANES * (linear->dtype == QS_F32 ? 4 : 2);
    for (int32_t ticket; (ticket = take(phase)) < pieces; mine++) {
        int32_t piece = spread(ticket, pieces, pool->threads), head = piece / columns % op->heads;
        int32_t tile = piece % columns * TILES, some = tiles - tile < TILES ? tiles - tile : TILES;
        int32_t row = piece / columns / op->heads * part, end = rows - row < part ? rows : row + part;
        qs_linear of_head = *linear;
        of_head.weight = (const uint8_t *)linear->weight + head * size;
        of_head.out = linear->out + (int64_t)head * op->out_head;
        job->kernels->linear_float(&of_head, linear->x + (int64_t)head * op->x_head, row, end, tile, some, NULL);
    }
    settle(pool, phase, pieces, mine);
}
