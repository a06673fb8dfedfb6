/* Adapters (LoRA), behind the products of program.c. Neighbouring rows with the same adapter are multiplied together, so
 * that its matrices are read once. */

enum { SHRINK, EXPAND }; /* phases of the operation */

#define ADAPTED_ROWS 24 /* at most in one piece of work */
#define ADAPTED_TILES 8

/* Neighbouring rows with one adapter, first .. end - 1, `chunk` of them in a piece. */
struct span {
    int32_t slot, first, end, chunk;
};

/* The next span from `row` on; it is empty where no further row has an adapter. */
static struct span next_span(const int32_t *adapters, int32_t row, int32_t rows, int32_t threads)
{
    while (row < rows && adapters[row] < 0)
        row++;
    struct span span = {row < rows ? adapters[row] : -1, row, row, 4};
    while (span.end < rows && adapters[span.end] == span.slot)
        span.end++;
    int32_t share = (span.end - span.first + 2 * threads - 1) / (2 * threads);
    span.chunk = share < 4 ? 4 : share > ADAPTED_ROWS ? ADAPTED_ROWS : share;
    return span;
}

static int64_t shrunk_bytes(const qs_lora *op, int64_t rows)
{
    return align64(4 * rows * op->max_rank);
}

static int64_t lora_bytes(const qs_lora *op, int64_t rows)
{
    return op->parts * shrunk_bytes(op, rows);
}

static int32_t pieces_across(int32_t n)
{
    return (n + ADAPTED_TILES * QS_LANES - 1) / (ADAPTED_TILES * QS_LANES);
}

/* shrunk = scale * A x for rows row .. end - 1 of a span and one linear. */
static void shrink(const struct job *job, const qs_lora *op, const qs_adapter *adapter, int32_t first, float *shrunk,
                   int32_t row, int32_t end)
{
    qs_linear product = {0};
    product.out = shrunk;
    product.weight = adapter->a;
    product.k = product.x_stride = op->width;
    product.n = product.out_stride = adapter->rank;
    product.dtype = adapter->a_dtype;
    job->kernels->linear_float(&product, op->x + (int64_t)first * op->width, row, end, 0,
                               (adapter->rank + QS_LANES - 1) / QS_LANES, NULL);
    for (int64_t i = (int64_t)row * adapter->rank; i < (int64_t)end * adapter->rank; i++)
        shrunk[i] *= adapter->scale;
}

/* out += B shrunk, in some tiles of the linear's columns. */
static void expand(const struct job *job, const qs_lora *op, const qs_adapter *adapter, const int32_t *columns,
                   int32_t first, const float *shrunk, int32_t row, int32_t end, int32_t tile)
{
    qs_linear product = {0};
    int32_t tiles = (columns[1] + QS_LANES - 1) / QS_LANES - tile;
    product.out = op->out + (int64_t)first * op->out_stride + columns[0];
    product.weight = adapter->b;
    product.k = product.x_stride = adapter->rank;
    product.n = columns[1];
    product.out_stride = op->out_stride;
    product.dtype = adapter->b_dtype;
    product.accumulate = 1;
    job->kernels->linear_float(&product, shrunk, row, end, tile, tiles < ADAPTED_TILES ? tiles : ADAPTED_TILES, NULL);
}

static void run_lora(const struct job *job, qs_pool *pool, struct phase *phase, const qs_lora *op, int32_t rows)
{
    const int32_t *adapters = job->step->adapters;
    uint8_t *shared = job->scratch + thread_bytes(&job->layout) * pool->threads;
    int32_t across = 0;
    if (!adapters)
        return;
    for (int32_t part = 0; part < op->parts; part++)
        across += pieces_across(op->columns[2 * part + 1]);
    for (int32_t p = SHRINK; p <= EXPAND; p++) {
        struct span span = next_span(adapters, 0, rows, pool->threads);
        const int32_t wide = p == SHRINK ? op->parts : across; /* pieces of the same rows */
        int32_t before = 0, mine = 0;
        for (;; mine++) {
            int32_t piece = take(phase + p), chunks;
            for (; (chunks = (span.end - span.first + span.chunk - 1) / span.chunk) && piece >= before + chunks * wide;
                 before += chunks * wide)
                span = next_span(adapters, span.end, rows, pool->threads);
            if (!chunks)
                break;
            int32_t at = (piece - before) % wide, row = (piece - before) / wide * span.chunk, part = 0;
            int32_t length = span.end - span.first, end = length - row < span.chunk ? length : row + span.chunk;
            if (p == SHRINK)
                part = at;
            else
                for (int32_t more; at >= (more = pieces_across(op->columns[2 * part + 1])); at -= more)
                    part++;
            const qs_adapter *adapter = op->adapters + (int64_t)span.slot * op->parts + part;
            float *shrunk = (float *)(shared + part * shrunk_bytes(op, rows)) + (int64_t)span.first * op->max_rank;
            if (adapter->rank && p == SHRINK)
                shrink(job, op, adapter, span.first, shrunk, row, end);
            else if (adapter->rank)
                expand(job, op, adapter, op->columns + 2 * part, span.first, shrunk, row, end, at * ADAPTED_TILES);
        }
        settle(pool, phase + p, before, mine);
    }
}
