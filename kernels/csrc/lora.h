/* Adapters (LoRA), with or behind the products of program.c. Neighbouring rows with the same adapter are multiplied
 * together, so that its matrices are read once. */

enum { SHRINK, EXPAND }; /* phases of the operation alone */

#define ADAPTED_ROWS 24 /* in one piece of the second */
#define ADAPTED_TILES 32
#define STRIP (16 << 10) /* outputs of a strip, about as many as the first-level cache holds, unless it is one piece */

static int64_t shrunk_numbers(const qs_lora *op, int64_t rows)
{
    return rows * qs_shrunk_stride(op);
}

/* Bytes of A x, f32 [parts][rows][stride]. */
static int64_t lora_bytes(const qs_lora *op, int64_t rows)
{
    return align64(4 * op->parts * shrunk_numbers(op, rows));
}

/* The adapters that are computed with the product i, or NULL. The rows of its input are shrunk where they are prepared,
 * and each piece of its output is expanded while it is in the cache: so no thread waits for another once more. */
static const qs_lora *joined_lora(const qs_op *ops, int32_t count, int32_t i)
{
    const qs_linear *product = &ops[i].linear;
    const qs_lora *lora = &ops[i + 1].lora;
    if (i + 1 >= count || ops[i].kind != QS_LINEAR || ops[i + 1].kind != QS_LORA || ops[i].rows != ops[i + 1].rows)
        return NULL;
    if (product->out != lora->out || product->out_stride != lora->out_stride || product->gated)
        return NULL;
    for (int32_t part = 0; part < lora->parts; part++)
        if (lora->columns[2 * part] % QS_LANES || lora->columns[2 * part] + lora->columns[2 * part + 1] > product->n)
            return NULL;
    return lora;
}

/* How many rows from `row` on, and before `end`, have the same adapter, or none. */
static int32_t alike_adapters(const int32_t *adapters, int32_t row, int32_t end)
{
    int32_t next = row + 1;
    while (next < end && adapters[next] == adapters[row])
        next++;
    return next - row;
}

/* shrunk = scale * A x for the rows row .. end - 1 of `rows`. */
static void shrink_rows(const struct job *job, const qs_lora *op, float *shrunk, int32_t rows, int32_t row, int32_t end)
{
    const int32_t *adapters = job->step->adapters;
    for (int32_t count; row < end; row += count) {
        count = alike_adapters(adapters, row, end);
        for (int32_t part = 0; part < op->parts && adapters[row] >= 0; part++) {
            const qs_adapter *adapter = op->adapters + (int64_t)adapters[row] * op->parts + part;
            if (adapter->rank)
                job->kernels->shrink(op, adapter, op->x + (int64_t)row * op->width,
                                     shrunk + shrunk_numbers(op, (int64_t)part * rows + row), count);
        }
    }
}

/* out += B shrunk for the same rows, in the columns begin .. end - 1 of one linear; begin is that of a tile. */
static void expand_part(const struct job *job, const qs_lora *op, int32_t part, const float *shrunk, int32_t rows,
                        int32_t row, int32_t last, int32_t begin, int32_t end)
{
    const int32_t *adapters = job->step->adapters;
    for (int32_t count; row < last; row += count) {
        count = alike_adapters(adapters, row, last);
        if (adapters[row] < 0)
            continue;
        const qs_adapter *adapter = op->adapters + (int64_t)adapters[row] * op->parts + part;
        if (adapter->rank)
            job->kernels->expand(op, adapter, shrunk + shrunk_numbers(op, (int64_t)part * rows + row),
                                 op->out + (int64_t)row * op->out_stride + op->columns[2 * part] + begin, count,
                                 begin / QS_LANES, end - begin);
    }
}

/* Neighbouring pieces of a product that one thread has computed, rows row .. last - 1 of columns begin .. end - 1. */
struct strip {
    int32_t row, last, begin, end;
};

/* out += B shrunk in a strip, which is empty then. */
static void expand_strip(const struct job *job, const qs_lora *op, struct strip *strip, const float *shrunk,
                         int32_t rows)
{
    for (int32_t part = 0; part < op->parts; part++) {
        int32_t first = op->columns[2 * part], n = op->columns[2 * part + 1];
        int32_t from = strip->begin > first ? strip->begin - first : 0;
        int32_t to = strip->end - first < n ? strip->end - first : n;
        if (from < to)
            expand_part(job, op, part, shrunk, rows, strip->row, strip->last, from, to);
    }
    strip->begin = strip->end;
}

/* Adds a piece to the strip of its thread, which is expanded as a whole while it is in the cache: each row may have a B of
 * its own, and memory is fast where it is read in long runs. */
static void expand_later(const struct job *job, const qs_lora *op, struct strip *strip, const float *shrunk,
                         int32_t rows, int32_t row, int32_t last, int32_t begin, int32_t end)
{
    if (strip->row != row || strip->end != begin || (int64_t)(end - strip->begin) * (last - row) > STRIP) {
        expand_strip(job, op, strip, shrunk, rows);
        *strip = (struct strip){row, last, begin, begin};
    }
    strip->end = end;
}

static int32_t pieces_across(int32_t n)
{
    return (n + ADAPTED_TILES * QS_LANES - 1) / (ADAPTED_TILES * QS_LANES);
}

/* The operation alone: behind several products, or where linears begin within a tile. */
static void run_lora(const struct job *job, qs_pool *pool, struct phase *phase, const qs_lora *op, int32_t rows)
{
    float *shrunk = (float *)(job->scratch + thread_bytes(&job->layout) * pool->threads);
    int32_t across = 0, mine = 0, piece, pieces = row_pieces(rows);
    if (!job->step->adapters)
        return;
    for (; (piece = take(phase + SHRINK)) < pieces; mine++) {
        int32_t row = piece * ROW_PIECE;
        shrink_rows(job, op, shrunk, rows, row, rows - row < ROW_PIECE ? rows : row + ROW_PIECE);
    }
    settle(pool, phase + SHRINK, pieces, mine);
    for (int32_t part = 0; part < op->parts; part++)
        across += pieces_across(op->columns[2 * part + 1]);
    pieces = (rows + ADAPTED_ROWS - 1) / ADAPTED_ROWS * across;
    for (mine = 0; (piece = take(phase + EXPAND)) < pieces; mine++) {
        int32_t row = piece / across * ADAPTED_ROWS, at = piece % across, part = 0;
        for (int32_t more; at >= (more = pieces_across(op->columns[2 * part + 1])); at -= more)
            part++;
        int32_t n = op->columns[2 * part + 1], begin = at * ADAPTED_TILES * QS_LANES;
        expand_part(job, op, part, shrunk, rows, row, rows - row < ADAPTED_ROWS ? rows : row + ADAPTED_ROWS, begin,
                    n - begin < ADAPTED_TILES * QS_LANES ? n : begin + ADAPTED_TILES * QS_LANES);
    }
    settle(pool, phase + EXPAND, pieces, mine);
}
