/* Runs a program of operations on a small pool of threads. It splits work; the ISA tables do the arithmetic. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "internal.h"

#define TILES 4       /* weight tiles in one piece of work */
#define SPIN 4000     /* pauses before a waiting thread sleeps: tens of microseconds */
#define ROW_PIECE 4   /* rows in one piece of row-wise work */
#define PART 12       /* a float product is cut into parts of a multiple of so many rows: whole blocks of the kernels */
#define SHARE 8       /* pieces for each thread: with so many, waiting for the last one is short */

#define PHASES 7      /* the most of an operation */

/* One piece-wise part of an operation: the next piece to take, and how many are done. `parts`: what an earlier phase
 * found out about the size of this one. */
struct phase {
    atomic_int next, done, parts;
};

/* Threads help, they do not meet: a thread without a piece holds up nobody, however late the system lets it run. A
 * program goes on as soon as all pieces of an operation are done, and a late thread joins where the others are. */
struct qs_pool {
    atomic_int epoch;  /* bumped once per qs_run: wakes the workers */
    atomic_int open;   /* whether workers may join the job */
    atomic_int inside; /* workers that may look at the job */
    atomic_int sleeping;
    atomic_int stop;
    atomic_int lost;   /* whether another rank has ended */
    int32_t threads, capacity;
    int32_t cpu; /* of the caller, or -1 */
    pthread_t *workers;
    struct phase *phases; /* PHASES for each operation; `capacity` operations */
    const struct job *job;
};

/* Bytes of scratch. Each thread has a prepared row, a normed row, and unpacked tiles. The prepared rows that all
 * threads share come behind them. */
struct layout {
    int64_t row, normed, unpacked, shared;
};

struct job {
    const qs_op *ops;
    int32_t count;
    const qs_step *step;
    const qs_kernels *kernels;
    uint8_t *scratch;
    struct layout layout;
};

struct worker {
    qs_pool *pool;
    int32_t thread;
};

static void relax(void)
{
#ifdef QS_X86
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Returns once *word differs from seen: spins, then sleeps. */
static void wait_change(qs_pool *pool, atomic_int *word, int seen)
{
    for (int i = 0; i < SPIN; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen)
            return;
        relax();
    }
    atomic_fetch_add(&pool->sleeping, 1);
    while (atomic_load(word) == seen) {
#ifdef __linux__
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
        usleep(50);
#endif
    }
    atomic_fetch_sub(&pool->sleeping, 1);
}

static void wake(qs_pool *pool, atomic_int *word)
{
#ifdef __linux__
    if (atomic_load(&pool->sleeping))
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
#else
    (void)pool;
    (void)word;
#endif
}

static int32_t take(struct phase *phase)
{
    return atomic_fetch_add_explicit(&phase->next, 1, memory_order_relaxed);
}

/* The piece behind a ticket. Threads that work at the same time take pieces far apart, each from its own share of all
 * pieces: near neighbours, the processor would prefetch the lines that another thread writes and take them away. */
static int32_t spread(int32_t ticket, int32_t pieces, int32_t threads)
{
    int32_t share = pieces / threads, more = pieces % threads, at = ticket % threads;
    return at * share + (at < more ? at : more) + ticket / threads;
}

/* Adds the pieces that this thread did, and returns when all are done. */
static void settle(qs_pool *pool, struct phase *phase, int32_t pieces, int32_t mine)
{
    if (mine && atomic_fetch_add(&phase->done, mine) + mine == pieces)
        wake(pool, &phase->done);
    for (int done; (done = atomic_load(&phase->done)) < pieces;)
        wait_change(pool, &phase->done, done);
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t align64(int64_t bytes)
{
    return (bytes + 63) & ~(int64_t)63;
}

static int is_integer(const qs_linear *op)
{
    return op->dtype == QS_U8 || op->dtype == QS_U4 || op->dtype == QS_TRELLIS;
}

/* Whether the product reads a prepared input instead of x. */
static int is_prepared(const qs_linear *op)
{
    return op->norm || op->act_dtype != QS_F32;
}

/* Bytes of `rows` prepared rows of the input: codes with scales, sums and reach, or floats. */
static int64_t input_bytes(const qs_linear *op, int64_t rows)
{
    if (!is_integer(op))
        return is_prepared(op) ? align64(rows * op->k * 4) : 0;
    return align64(rows * op->k) + 3 * align64(rows * (op->k / op->act_group) * 4) + 64; /* a vector may be read behind */
}

static qs_acts acts_at(uint8_t *memory, const qs_linear *op, int64_t rows)
{
    const int64_t codes = align64(rows * op->k), each = align64(rows * (op->k / op->act_group) * 4);
    return (qs_acts){
        .codes = (int8_t *)memory,
        .scales = (float *)(memory + codes),
        .sums = (int32_t *)(memory + codes + each),
        .reach = (int32_t *)(memory + codes + 2 * each),
        .rows = rows,
    };
}


static int64_t thread_bytes(const struct layout *layout)
{
    return layout->row + layout->normed + layout->unpacked;
}

/* The input x as the product reads it, to row r of `memory`, which has room for `rows`. `normed` has room for x. */
static void prepare_row(const struct job *job, const qs_linear *op, const float *x, uint8_t *memory, float *normed,
                        int64_t rows, int64_t r)
{
    const qs_kernels *kernels = job->kernels;
    if (op->norm) {
        if (op->centred)
            kernels->layernorm(x, op->norm, op->norm_bias, normed, op->x_width, op->eps);
        else
            kernels->rmsnorm(x, op->norm, normed, op->x_width, op->eps);
        x = normed;
    }
    if (is_integer(op)) {
        qs_acts acts = acts_at(memory, op, rows);
        kernels->quantize(op, x, &acts, r);
    } else if (op->act_dtype != QS_F32)
        kernels->round_input(op, x, (float *)memory + r * op->k);
    else
        memcpy((float *)memory + r * op->k, x, sizeof(float) * (size_t)op->k);
}

static int32_t row_pieces(int32_t rows)
{
    return (rows + ROW_PIECE - 1) / ROW_PIECE;
}

/* Tiles of an integer product. Those of a trellis are decoded first. */
static void multiply_integers(const struct job *job, const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end,
                              int32_t tile, int32_t tiles, uint8_t *unpacked)
{
    qs_linear decoded = *op;
    const int64_t bytes = 2 * (int64_t)op->k * op->bits, size = (int64_t)op->k * QS_LANES;
    if (op->dtype == QS_TRELLIS) {
        const uint8_t *weight = op->weight;
        for (int32_t t = 0; t < tiles; t++)
            job->kernels->decode(weight + (tile + t) * bytes, weight + op->before[tile + t] * bytes, op->k, op->bits,
                                 unpacked + t * size);
        decoded.dtype = QS_U8;
        decoded.bits = 6;
        decoded.weight = unpacked - tile * size;
    }
    job->kernels->linear_int(&decoded, acts, row, end, tile, tiles, unpacked + (op->dtype == QS_TRELLIS ? TILES * size : 0));
}

#include "lora.h"

/* The rows row .. end - 1 of `rows` as the product and its adapters read them. */
static void prepare_rows(const struct job *job, const qs_linear *op, const qs_lora *lora, uint8_t *memory, float *normed,
                         float *shrunk, int32_t rows, int32_t row, int32_t end)
{
    if (lora)
        shrink_rows(job, lora, shrunk, rows, row, end);
    for (int64_t r = row; r < end && is_prepared(op); r++)
        prepare_row(job, op, op->x + r * op->x_width, memory, normed, rows, r);
}

/* `lora`: the adapters that are computed with it, or NULL. */
static void run_linear(const struct job *job, qs_pool *pool, int32_t thread, struct phase *phase, const qs_linear *op,
                       const qs_lora *lora, int32_t rows)
{
    int32_t tiles = (op->n + QS_LANES - 1) / QS_LANES, columns = (tiles + TILES - 1) / TILES, mine = 0;
    const int32_t block = is_integer(op) ? job->kernels->int_rows : PART;
    int32_t most = (rows + block - 1) / block, parts = (SHARE * pool->threads + columns - 1) / columns;
    parts = parts < most ? parts : most;
    int32_t part = (most + parts - 1) / parts * block; /* rows */
    int32_t pieces = columns * (parts = (rows + part - 1) / part);
    const struct layout *layout = &job->layout;
    uint8_t *own = job->scratch + thread_bytes(layout) * thread, *unpacked = own + layout->row + layout->normed;
    uint8_t *memory = rows == 1 ? own : job->scratch + thread_bytes(layout) * pool->threads;
    float *normed = (float *)(own + layout->row), *shrunk = (float *)(memory + input_bytes(op, rows));
    if ((is_prepared(op) || lora) && rows == 1) {
        /* Every thread prepares the row for itself, which is cheaper than waiting. If the others have gone on and the
         * row has changed, no piece is left for this thread. */
        if (atomic_load_explicit(&phase[1].next, memory_order_relaxed) < pieces)
            prepare_rows(job, op, lora, memory, normed, shrunk, 1, 0, 1);
    } else if (is_prepared(op) || lora) {
        int32_t each = lora && rows < ROW_PIECE * pool->threads ? (rows + pool->threads - 1) / pool->threads : ROW_PIECE;
        int32_t parts = (rows + each - 1) / each;
        for (int32_t ticket; (ticket = take(phase)) < parts; mine++) {
            int32_t row = spread(ticket, parts, pool->threads) * each;
            prepare_rows(job, op, lora, memory, normed, shrunk, rows, row, rows - row < each ? rows : row + each);
        }
        settle(pool, phase, parts, mine);
    }
    struct strip strip = {-1, -1, 0, 0};
    mine = 0;
    for (int32_t ticket; (ticket = take(phase + 1)) < pieces; mine++) {
        int32_t piece = spread(ticket, pieces, pool->threads);
        int32_t tile = piece % columns * TILES, some = tiles - tile < TILES ? tiles - tile : TILES;
        int32_t row = piece / columns * part, end = rows - row < part ? rows : row + part;
        if (is_integer(op)) {
            qs_acts acts = acts_at(memory, op, rows);
            multiply_integers(job, op, &acts, row, end, tile, some, unpacked);
        } else
            job->kernels->linear_float(op, is_prepared(op) ? (const float *)memory : op->x, row, end, tile,
                                       some, (float *)unpacked);
        if (lora)
            expand_later(job, lora, &strip, shrunk, rows, row, end, tile * QS_LANES, (tile + some) * QS_LANES);
    }
    if (lora)
        expand_strip(job, lora, &strip, shrunk, rows);
    settle(pool, phase + 1, pieces, mine);
}

#include "ranks.h"
#include "experts.h"
#include "paged_attention.h"
#include "latent_attention.h"
#include "sequences.h"

/* Makes room for what each thread needs for a product. */
static void add_product(struct layout *layout, const qs_linear *op)
{
    const int64_t each = op->dtype == QS_TRELLIS ? 2 : is_integer(op) ? 1 : op->dtype == QS_F8 ? 4 : 0; /* bytes of an input */
    const int64_t tiles = each * op->k * QS_LANES * TILES;
    layout->row = larger(layout->row, input_bytes(op, 1));
    layout->normed = larger(layout->normed, op->norm ? align64((int64_t)op->x_width * 4) : 0);
    layout->unpacked = larger(layout->unpacked, align64(tiles));
}

static int64_t route_bytes(const qs_route *op)
{
    return align64((int64_t)op->count * 14);
}

static struct layout plan_scratch(const qs_op *ops, int32_t count, int32_t rows)
{
    struct layout layout = {0, 0, 0, 0};
    for (int32_t i = 0; i < count; i++) {
        const qs_op *op = ops + i;
        if (op->kind == QS_ROUTE)
            layout.row = larger(layout.row, route_bytes(&op->route));
        if (op->kind == QS_LINEAR) {
            add_product(&layout, &op->linear);
            const qs_lora *lora = joined_lora(ops, count, i);
            layout.row = larger(layout.row, input_bytes(&op->linear, 1) + (lora ? lora_bytes(lora, 1) : 0));
            layout.shared = larger(layout.shared, input_bytes(&op->linear, rows) + (lora ? lora_bytes(lora, rows) : 0));
        }
        if (op->kind == QS_EXPERTS) {
            add_product(&layout, &op->experts.gate_up);
            add_product(&layout, &op->experts.down);
            layout.shared = larger(layout.shared, experts_bytes(&op->experts, rows));
        }
        if (op->kind == QS_LATENT_ATTENTION) {
            layout.row = larger(layout.row, latent_bytes());
            layout.shared = larger(layout.shared, latent_slots());
        }
        if (op->kind == QS_LORA)
            layout.shared = larger(layout.shared, lora_bytes(&op->lora, rows));
    }
    return layout;
}

int64_t qs_scratch_bytes(const qs_op *ops, int32_t count, int32_t max_rows, int32_t threads)
{
    struct layout layout = plan_scratch(ops, count, max_rows);
    return thread_bytes(&layout) * threads + layout.shared;
}

static void embed_row(const qs_embed *op, int32_t token, float *out)
{
    token -= op->first;
    if (token < 0 || token >= op->tokens) /* of another rank */
        return;
    int64_t at = (int64_t)token * op->width;
    const uint16_t *row = (const uint16_t *)op->table + at;
    const uint8_t *codes = (const uint8_t *)op->table + at;
    if (op->dtype == QS_F32)
        memcpy(out, (const float *)op->table + at, sizeof(float) * (size_t)op->width);
    else if (op->dtype == QS_F16 || op->dtype == QS_BF16)
        for (int32_t j = 0; j < op->width; j++)
            out[j] = op->dtype == QS_F16 ? qs_half_to_float(row[j]) : qs_bf16_to_float(row[j]);
    else {
        int64_t first = (int64_t)token * ((op->width + op->group - 1) / op->group);
        for (int32_t j = 0; j < op->width; j++) {
            int64_t g = first + j / op->group;
            int32_t zero = op->zeros ? op->zeros[g] : op->zero;
            out[j] = (op->dtype == QS_F8 ? qs_e4m3_to_float(codes[j]) : (float)(codes[j] - zero)) * op->scales[g];
        }
    }
    if (op->scale != 1.0f)
        for (int32_t j = 0; j < op->width; j++)
            out[j] *= op->scale;
}

static void add_positions(const qs_position_embed *op, int32_t position, float *out)
{
    int64_t at = (int64_t)(position + op->offset) * op->width;
    const uint16_t *halves = (const uint16_t *)op->table + at;
    const float *singles = (const float *)op->table + at;
    for (int32_t j = 0; j < op->width; j++)
        out[j] += op->dtype == QS_F32   ? singles[j]
                  : op->dtype == QS_F16 ? qs_half_to_float(halves[j])
                                        : qs_bf16_to_float(halves[j]);
}

/* The norms over all heads together, of one row. */
static void norm_heads(const struct job *job, const qs_rope_kv *op, float *row)
{
    int32_t heads = op->heads * op->head_dim, kv_heads = op->kv_heads * op->head_dim;
    if (op->q_norm)
        job->kernels->rmsnorm(row, op->q_norm, row, heads, op->eps);
    if (op->k_norm)
        job->kernels->rmsnorm(row + heads, op->k_norm, row + heads, kv_heads, op->eps);
}

static void run_row(const struct job *job, int32_t thread, const qs_op *op, int64_t r)
{
    const qs_kernels *kernels = job->kernels;
    const qs_step *step = job->step;
    switch (op->kind) {
    case QS_EMBED:
        embed_row(&op->embed, step->token_ids[r], op->embed.out + r * op->embed.width);
        break;
    case QS_POSITION_EMBED:
        add_positions(&op->position_embed, step->positions[r], op->position_embed.out + r * op->position_embed.width);
        break;
    case QS_RMS_NORM:
        (op->rms_norm.accumulate ? kernels->add_rmsnorm : kernels->rmsnorm)(
            op->rms_norm.x + r * op->rms_norm.width, op->rms_norm.weight, op->rms_norm.out + r * op->rms_norm.out_stride,
            op->rms_norm.width, op->rms_norm.eps);
        break;
    case QS_LAYER_NORM:
        kernels->layernorm(op->layer_norm.x + r * op->layer_norm.width, op->layer_norm.weight, op->layer_norm.bias,
                           op->layer_norm.out + r * op->layer_norm.width, op->layer_norm.width, op->layer_norm.eps);
        break;
    case QS_HEAD_NORM:
        for (int64_t h = 0; h < op->head_norm.heads; h++) {
            float *x = op->head_norm.x + r * op->head_norm.x_stride + h * op->head_norm.head_dim;
            kernels->layernorm(x, op->head_norm.weight + h * op->head_norm.head_dim, NULL, x, op->head_norm.head_dim,
                               op->head_norm.eps);
        }
        break;
    case QS_ROPE_KV: {
        int64_t width = (int64_t)(op->rope_kv.heads + 2 * op->rope_kv.kv_heads) * op->rope_kv.head_dim;
        if (op->rope_kv.norm_over_heads)
            norm_heads(job, &op->rope_kv, op->rope_kv.qkv + r * width);
        for (int32_t head = 0; head < op->rope_kv.kv_heads; head++)
            kernels->rope_kv(&op->rope_kv, op->rope_kv.qkv + r * width, step->positions[r], step->slots[r], head);
        break;
    }
    case QS_LATENT_KV:
        kernels->latent_kv(&op->latent_kv, op->latent_kv.kv + r * (op->latent_kv.rank + op->latent_kv.rope),
                           op->latent_kv.q + r * op->latent_kv.q_stride, op->latent_kv.out + r * op->latent_kv.out_stride,
                           step->positions[r], step->slots[r]);
        break;
    case QS_CAST:
        memcpy(op->cast.out + r * op->cast.out_stride, op->cast.x + r * op->cast.x_stride,
               sizeof(float) * (size_t)op->cast.width);
        break;
    case QS_ACTIVATION: {
        const int64_t width = op->activation.width;
        const float *x = op->activation.x + r * width * (1 + op->activation.gated);
        kernels->activate(x, op->activation.gated ? x + width : NULL, op->activation.out + r * op->activation.out_stride,
                          (int32_t)width, op->activation.function);
        break;
    }
    case QS_SOFT_CAP:
        kernels->soft_cap(op->soft_cap.x + r * op->soft_cap.width, op->soft_cap.width, op->soft_cap.cap);
        break;
    case QS_GATHER:
        memcpy(op->gather.out + r * op->gather.width,
               op->gather.x + (int64_t)step->logit_rows[r] * op->gather.width,
               sizeof(float) * (size_t)op->gather.width);
        break;
    case QS_ARGMAX:
        op->argmax.out[r] = kernels->argmax(op->argmax.x + r * op->argmax.width, op->argmax.width);
        break;
    case QS_SIGMOID_MUL:
        kernels->sigmoid_mul(op->sigmoid_mul.gate + r * op->sigmoid_mul.gates,
                             op->sigmoid_mul.out + r * op->sigmoid_mul.out_stride, op->sigmoid_mul.width,
                             op->sigmoid_mul.gates);
        break;
    case QS_ROUTE:
        kernels->route(&op->route, op->route.logits + r * op->route.count, op->route.experts + r * op->route.top_k,
                       op->route.weights + r * op->route.top_k,
                       (float *)(job->scratch + thread_bytes(&job->layout) * thread));
        break;
    case QS_LOG_SOFTMAX:
        kernels->log_softmax(op->log_softmax.x + r * op->log_softmax.width, op->log_softmax.width);
        break;
    }
}

static void run_job(qs_pool *pool, int32_t thread)
{
    const struct job *job = pool->job;
    for (int32_t i = 0; i < job->count; i++) {
        const qs_op *op = job->ops + i;
        struct phase *phase = pool->phases + PHASES * i;
        int32_t rows = op->rows == QS_ROWS_LOGITS ? job->step->logits : job->step->tokens, mine = 0;
        if (rows == 0 || is_joined(job, i))
            continue;
        if (op->kind == QS_LINEAR)
            run_linear(job, pool, thread, phase, &op->linear,
                       job->step->adapters ? joined_lora(job->ops, job->count, i) : NULL, rows);
        else if (op->kind == QS_EXPERTS)
            run_experts(job, pool, thread, phase, &op->experts, rows);
        else if (op->kind == QS_LORA) {
            if (!i || !joined_lora(job->ops, job->count, i - 1))
                run_lora(job, pool, phase, &op->lora, rows);
        }
        else if (op->kind == QS_HEAD_LINEAR)
            run_head_linear(job, pool, phase, &op->head_linear, rows);
        else if (op->kind == QS_LATENT_ATTENTION)
            run_latent_attention(job, pool, thread, phase, &op->latent_attention);
        else if (op->kind == QS_ALL_GATHER)
            meet_others(pool, phase, &op->all_gather.ranks);
        else if (op->kind == QS_CAUSAL_CONV || op->kind == QS_GATED_DELTA)
            run_sequences(job, pool, phase, op);
        else if (op->kind == QS_ATTENTION)
            run_attention(job, pool, phase, &op->attention,
                          i && is_joined(job, i - 1) ? &op[-1].rope_kv : NULL);
        else {
            for (int32_t ticket, pieces = row_pieces(rows); (ticket = take(phase)) < pieces; mine++) {
                int32_t piece = spread(ticket, pieces, pool->threads);
                for (int32_t r = piece * ROW_PIECE; r < rows && r < (piece + 1) * ROW_PIECE; r++)
                    run_row(job, thread, op, r);
            }
            settle(pool, phase, row_pieces(rows), mine);
        }
    }
}

static void *worker_main(void *argument)
{
    struct worker worker = *(struct worker *)argument;
    qs_pool *pool = worker.pool;
    int seen = 0;
    free(argument);
    for (;;) {
        wait_change(pool, &pool->epoch, seen);
        seen = atomic_load(&pool->epoch);
        if (atomic_load(&pool->stop))
            return NULL;
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->open))
            run_job(pool, worker.thread);
        atomic_fetch_sub(&pool->inside, 1);
        wake(pool, &pool->inside);
    }
}

qs_pool *qs_pool_create(int32_t threads, const int32_t *cpus)
{
    qs_pool *pool = calloc(1, sizeof(*pool));
    if (!pool || threads < 1 || !(pool->workers = calloc((size_t)threads, sizeof(pthread_t)))) {
        free(pool);
        return NULL;
    }
    pool->threads = 1;
    pool->cpu = cpus ? cpus[0] : -1;
    for (int32_t i = 1; i < threads; i++) {
        struct worker *worker = malloc(sizeof(*worker));
        if (worker)
            *worker = (struct worker){pool, i};
        if (!worker || pthread_create(&pool->workers[i], NULL, worker_main, worker)) {
            free(worker);
            qs_pool_destroy(pool);
            return NULL;
        }
        pool->threads++;
        if (cpus && qs_pin(pool->workers[i], cpus[i], NULL)) {
            qs_pool_destroy(pool);
            return NULL;
        }
    }
    return pool;
}

void qs_pool_destroy(qs_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->epoch, 1);
    wake(pool, &pool->epoch);
    for (int32_t i = 1; i < pool->threads; i++)
        pthread_join(pool->workers[i], NULL);
    free(pool->workers);
    free(pool->phases);
    free(pool);
}

int32_t qs_op_size(void)
{
    return (int32_t)sizeof(qs_op);
}

int32_t qs_step_size(void)
{
    return (int32_t)sizeof(qs_step);
}

const char *qs_op_name(int32_t kind)
{
    static const char *const names[] = {
        [QS_EMBED] = "embed",
        [QS_POSITION_EMBED] = "position_embed",
        [QS_RMS_NORM] = "rms_norm",
        [QS_LAYER_NORM] = "layer_norm",
        [QS_HEAD_NORM] = "head_norm",
        [QS_CAST] = "cast",
        [QS_LINEAR] = "linear",
        [QS_ROPE_KV] = "rope_kv",
        [QS_ATTENTION] = "attention",
        [QS_ACTIVATION] = "activation",
        [QS_GATHER] = "gather",
        [QS_SOFT_CAP] = "soft_cap",
        [QS_ARGMAX] = "argmax",
        [QS_LOG_SOFTMAX] = "log_softmax",
        [QS_ROUTE] = "route",
        [QS_EXPERTS] = "experts",
        [QS_SIGMOID_MUL] = "sigmoid_mul",
        [QS_LORA] = "lora",
        [QS_ALL_GATHER] = "all_gather",
        [QS_HEAD_LINEAR] = "head_linear",
        [QS_LATENT_KV] = "latent_kv",
        [QS_LATENT_ATTENTION] = "latent_attention",
        [QS_CAUSAL_CONV] = "causal_conv",
        [QS_GATED_DELTA] = "gated_delta",
    };
    return kind >= 0 && kind < (int32_t)(sizeof names / sizeof *names) ? names[kind] : NULL;
}

int32_t qs_run(const qs_op *ops, int32_t count, const qs_step *step, qs_pool *pool, void *scratch, int32_t isa)
{
    struct job job = {ops, count, step, qs_kernels_of(isa), scratch, plan_scratch(ops, count, 1)};
    if (!job.kernels)
        return -1;
    qs_cpus before;
    if (count > pool->capacity) {
        struct phase *phases = realloc(pool->phases, sizeof(*phases) * PHASES * (size_t)count);
        if (!phases)
            return -2;
        pool->phases = phases;
        pool->capacity = count;
    }
    memset(pool->phases, 0, sizeof(*pool->phases) * PHASES * (size_t)count);
    int pinned = pool->cpu >= 0 && qs_pin(pthread_self(), pool->cpu, &before) == 0;
    pool->job = &job;
    atomic_store(&pool->lost, 0);
    atomic_store(&pool->open, 1);
    atomic_fetch_add(&pool->epoch, 1);
    wake(pool, &pool->epoch);
    run_job(pool, 0);
    atomic_store(&pool->open, 0);
    for (int inside; (inside = atomic_load(&pool->inside));) /* they may still look at the job, which ends with this call */
        wait_change(pool, &pool->inside, inside);
    if (pinned)
        qs_unpin(pthread_self(), &before);
    return atomic_load(&pool->lost) ? -3 : 0;
}
