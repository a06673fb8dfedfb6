/* Mixtures of experts, behind the products of program.c: the rows of a step are sorted by their expert, so that each
 * expert's weights are read once, and only those of experts that some row chose. */

enum { SORT, INPUT, GATE_UP, INNER, DOWN, MEET, COMBINE }; /* phases of the operation */

/* The rows first .. end - 1 of all choices, which go to one expert. */
struct run {
    int32_t expert, first, end;
};

/* The memory that threads share: choice t * top_k + j of token t is row place[...] in the order of the experts. */
struct sorted {
    int32_t *place, *counts;
    struct run *runs;
    uint8_t *input;
};

static int64_t list_bytes(const qs_experts *op, int64_t choices)
{
    return align64(4 * choices) + align64(4 * (int64_t)op->count) + align64((int64_t)sizeof(struct run) * op->count);
}

/* Bytes of the sorted input of the first product, floats if it is not rounded. */
static int64_t sorted_bytes(const qs_linear *op, int64_t choices)
{
    return larger(input_bytes(op, choices), is_integer(op) ? 0 : align64(choices * op->k * 4));
}

static int64_t experts_bytes(const qs_experts *op, int64_t rows)
{
    int64_t choices = rows * op->top_k;
    return list_bytes(op, choices) + larger(sorted_bytes(&op->gate_up, choices), input_bytes(&op->down, choices));
}

static struct sorted sorted_at(uint8_t *memory, const qs_experts *op, int64_t choices)
{
    struct sorted sorted;
    sorted.place = (int32_t *)memory;
    sorted.counts = (int32_t *)(memory + align64(4 * choices));
    sorted.runs = (struct run *)(memory + align64(4 * choices) + align64(4 * (int64_t)op->count));
    sorted.input = memory + list_bytes(op, choices);
    return sorted;
}

static int is_held(const qs_experts *op, int32_t expert)
{
    return expert >= op->first && expert < op->first + op->held;
}

/* Returns the number of runs: those of experts that this rank has. Their numbers count from its first. */
static int32_t sort_choices(const qs_experts *op, const struct sorted *sorted, int32_t choices)
{
    int32_t runs = 0, start = 0;
    memset(sorted->counts, 0, sizeof(int32_t) * (size_t)op->count);
    for (int32_t i = 0; i < choices; i++)
        sorted->counts[op->experts[i]]++;
    for (int32_t e = 0; e < op->count; e++) {
        int32_t end = start + sorted->counts[e];
        if (end > start && is_held(op, e))
            sorted->runs[runs++] = (struct run){e - op->first, start, end};
        sorted->counts[e] = start;
        start = end;
    }
    for (int32_t i = 0; i < choices; i++)
        sorted->place[i] = sorted->counts[op->experts[i]]++;
    return runs;
}

/* The product of expert `e`. Its tiles lie behind those of the experts before it. */
static qs_linear of_expert(const qs_linear *op, const float *input_scales, int64_t e)
{
    static const int32_t quarters[] = {[QS_F32] = 16, [QS_F16] = 8, [QS_BF16] = 8, [QS_U8] = 4, [QS_U4] = 2, [QS_F8] = 4};
    int64_t tiles = (op->n + QS_LANES - 1) / QS_LANES, groups = op->group ? (op->k + op->group - 1) / op->group : 0;
    qs_linear one = *op;
    int64_t eighths = tiles * 2 * quarters[op->dtype]; /* of the bytes of a lane */
    if (op->dtype == QS_TRELLIS)
        eighths = (int64_t)op->tiles * op->bits;
    one.weight = (const uint8_t *)op->weight + e * eighths * op->k * QS_LANES / 8;
    if (op->scales)
        one.scales = (const uint8_t *)op->scales + e * tiles * groups * QS_LANES * qs_scale_bytes(op);
    if (op->zeros)
        one.zeros = (const uint8_t *)op->zeros + e * tiles * groups * QS_LANES * qs_scale_bytes(op);
    if (op->row_scales)
        one.row_scales = op->row_scales + e * tiles * QS_LANES;
    if (op->bias)
        one.bias = op->bias + e * op->n;
    if (op->permutation)
        one.permutation = op->permutation + e * op->k;
    if (input_scales)
        one.input_scale = input_scales[e];
    return one;
}

static void copy_row(const qs_linear *op, uint8_t *memory, int64_t rows, int64_t from, int64_t to)
{
    if (!is_integer(op)) {
        memcpy((float *)memory + to * op->k, (float *)memory + from * op->k, sizeof(float) * (size_t)op->k);
        return;
    }
    qs_acts acts = acts_at(memory, op, rows);
    const int64_t width = op->act_group;
    for (int64_t part = 0; part < op->k / width; part++, from += rows, to += rows) {
        memcpy(acts.codes + to * width, acts.codes + from * width, (size_t)width);
        acts.scales[to] = acts.scales[from];
        acts.sums[to] = acts.sums[from];
        acts.reach[to] = acts.reach[from];
    }
}

/* The input of token t for each of its experts. They share it unless each rounds it in its own way. */
static void prepare_token(const struct job *job, const qs_experts *op, const struct sorted *sorted, int32_t choices,
                          int32_t t)
{
    const qs_linear *linear = &op->gate_up;
    const float *x = linear->x + (int64_t)t * linear->x_width;
    const int32_t *place = sorted->place + t * op->top_k, *expert = op->experts + t * op->top_k;
    int32_t done = -1;
    for (int32_t j = 0; j < op->top_k; j++) {
        if (!is_held(op, expert[j]))
            continue;
        if (done >= 0 && !linear->permutation && !op->gate_up_scales) {
            copy_row(linear, sorted->input, choices, place[done], place[j]);
            continue;
        }
        qs_linear one = of_expert(linear, op->gate_up_scales, expert[j] - op->first);
        prepare_row(job, &one, x, sorted->input, NULL, choices, place[j]);
        done = j;
    }
}

/* A piece is all rows of an expert by some tiles. */
static void run_products(const struct job *job, qs_pool *pool, struct phase *phase, const qs_linear *op,
                         const float *input_scales, const struct sorted *sorted, int32_t runs, int32_t choices,
                         const float *floats, uint8_t *unpacked)
{
    int32_t tiles = (op->n + QS_LANES - 1) / QS_LANES, columns = (tiles + TILES - 1) / TILES, mine = 0;
    int32_t pieces = runs * columns;
    for (int32_t ticket; (ticket = take(phase)) < pieces; mine++) {
        int32_t piece = spread(ticket, pieces, pool->threads), tile = piece % columns * TILES;
        int32_t some = tiles - tile < TILES ? tiles - tile : TILES;
        struct run run = sorted->runs[piece / columns];
        qs_linear one = of_expert(op, input_scales, run.expert);
        if (is_integer(op)) {
            qs_acts acts = acts_at(sorted->input, op, choices);
            multiply_integers(job, &one, &acts, run.first, run.end, tile, some, unpacked);
        } else
            job->kernels->linear_float(&one, floats, run.first, run.end, tile, some, (float *)unpacked);
    }
    settle(pool, phase, pieces, mine);
}

static void run_experts(const struct job *job, qs_pool *pool, int32_t thread, struct phase *phase, const qs_experts *op,
                        int32_t rows)
{
    const struct layout *layout = &job->layout;
    const int32_t choices = rows * op->top_k, row_piece = ROW_PIECE;
    uint8_t *unpacked = job->scratch + thread_bytes(layout) * thread + layout->row + layout->normed;
    struct sorted sorted = sorted_at(job->scratch + thread_bytes(layout) * pool->threads, op, choices);
    int32_t mine = 0;
    if (take(phase + SORT) == 0) {
        atomic_store(&phase[GATE_UP].parts, sort_choices(op, &sorted, choices));
        mine = 1;
    }
    settle(pool, phase + SORT, 1, mine);
    const int32_t runs = atomic_load(&phase[GATE_UP].parts); /* the lists may be gone already for a late thread */

    mine = 0;
    for (int32_t ticket, pieces = row_pieces(rows); (ticket = take(phase + INPUT)) < pieces; mine++) {
        int32_t first = spread(ticket, pieces, pool->threads) * row_piece;
        for (int32_t t = first; t < rows && t < first + row_piece; t++)
            prepare_token(job, op, &sorted, choices, t);
    }
    settle(pool, phase + INPUT, row_pieces(rows), mine);
    run_products(job, pool, phase + GATE_UP, &op->gate_up, op->gate_up_scales, &sorted, runs, choices,
                 (const float *)sorted.input, unpacked);

    if (is_prepared(&op->down)) {
        mine = 0;
        for (int32_t ticket, pieces = row_pieces(choices); (ticket = take(phase + INNER)) < pieces; mine++) {
            int32_t first = spread(ticket, pieces, pool->threads) * row_piece;
            for (int32_t i = first; i < choices && i < first + row_piece; i++) {
                if (!is_held(op, op->experts[i]))
                    continue;
                qs_linear one = of_expert(&op->down, op->down_scales, op->experts[i] - op->first);
                int64_t row = sorted.place[i];
                prepare_row(job, &one, one.x + row * one.x_width, sorted.input, NULL, choices, row);
            }
        }
        settle(pool, phase + INNER, row_pieces(choices), mine);
    }
    run_products(job, pool, phase + DOWN, &op->down, op->down_scales, &sorted, runs, choices,
                 is_prepared(&op->down) ? (const float *)sorted.input : op->down.x, unpacked);

    if (op->ranks.size > 1)
        meet_others(pool, phase + MEET, &op->ranks);
    mine = 0;
    for (int32_t ticket, pieces = row_pieces(rows); (ticket = take(phase + COMBINE)) < pieces; mine++) {
        int32_t first = spread(ticket, pieces, pool->threads) * row_piece;
        for (int32_t t = first; t < rows && t < first + row_piece; t++)
            if (t % op->ranks.size == op->ranks.rank)
                job->kernels->combine(op->down.out, sorted.place + t * op->top_k, op->weights + (int64_t)t * op->top_k,
                                      op->top_k, op->out + (int64_t)t * op->down.n, op->down.n, op->accumulate);
    }
    settle(pool, phase + COMBINE, row_pieces(rows), mine);
}
