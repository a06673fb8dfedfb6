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

/* One piece-wise part of an operation: the next piece to take, and how many are done. */
struct phase {
    atomic_int next, done;
};

/* Threads help rather than meet: who has no piece holds up nobody, however late the system lets it run. A program goes
 * on as soon as all pieces of an operation are done, and a thread that comes late joins where the others are. */
struct qs_pool {
    atomic_int epoch;  /* bumped once per qs_run: wakes the workers */
    atomic_int open;   /* whether workers may join the job */
    atomic_int inside; /* workers that look at the job */
    atomic_int sleeping;
    atomic_int stop;
    int32_t threads, capacity;
    int32_t cpu; /* of the caller, or -1 */
    pthread_t *workers;
    struct phase *phases; /* two for each operation; `capacity` operations */
    const struct job *job;
};

struct job {
    const qs_op *ops;
    int32_t count;
    const qs_step *step;
    const qs_kernels *kernels;
    uint8_t *scratch;
    int64_t row_bytes, thread_bytes; /* see plan_scratch */
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

/* Adds the pieces that this thread did, and returns when all are done. */
static void settle(qs_pool *pool, struct phase *phase, int32_t pieces, int32_t mine)
{
    if (mine && atomic_fetch_add(&phase->done, mine) + mine == pieces)
        wake(pool, &phase->done);
    for (int done; (done = atomic_load(&phase->done)) < pieces;)
        wait_change(pool, &phase->done, done);
}

static int64_t align64(int64_t bytes)
{
    return (bytes + 63) & ~(int64_t)63;
}

static int is_integer(const qs_linear *op)
{
    return op->dtype == QS_U8 || op->dtype == QS_U4;
}

/* Bytes of `rows` rounded rows of the input: codes, scales and sums, or floats. */
static int64_t input_bytes(const qs_linear *op, int64_t rows)
{
    if (!is_integer(op))
        return op->act_dtype == QS_F32 ? 0 : align64(rows * op->k * 4);
    return align64(rows * op->k) + 2 * align64(rows * (op->k / op->act_group) * 4);
}

static qs_acts acts_at(uint8_t *memory, const qs_linear *op, int64_t rows)
{
    int64_t parts = op->k / op->act_group;
    qs_acts acts;
    acts.codes = (int8_t *)memory;
    acts.scales = (float *)(memory + align64(rows * op->k));
    acts.sums = (int32_t *)(memory + align64(rows * op->k) + align64(rows * parts * 4));
    return acts;
}

/* Scratch is one part per thread, a rounded row and the unpacked tiles, and then the rounded rows that all share. */
static int64_t plan_scratch(const qs_op *ops, int32_t count, int32_t rows, int32_t threads, int64_t *row_bytes,
                            int64_t *thread_bytes)
{
    int64_t unpacked = 0, shared = 0;
    *row_bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        if (ops[i].kind != QS_LINEAR)
            continue;
        const qs_linear *op = &ops[i].linear;
        int64_t row = input_bytes(op, 1), all = input_bytes(op, rows);
        int64_t tiles = (int64_t)op->k * QS_LANES * TILES * (op->dtype == QS_U4 ? 1 : op->dtype == QS_F8 ? 4 : 0);
        *row_bytes = row > *row_bytes ? row : *row_bytes;
        shared = all > shared ? all : shared;
        unpacked = tiles > unpacked ? tiles : unpacked;
    }
    *thread_bytes = *row_bytes + align64(unpacked);
    return *thread_bytes * threads + shared;
}

int64_t qs_scratch_bytes(const qs_op *ops, int32_t count, int32_t max_rows, int32_t threads)
{
    int64_t row_bytes, thread_bytes;
    return plan_scratch(ops, count, max_rows, threads, &row_bytes, &thread_bytes);
}

/* Rounds row r of the input, to codes or to floats at `memory`, which holds `rows` of them. */
static void round_row(const struct job *job, const qs_linear *op, uint8_t *memory, int64_t rows, int64_t r)
{
    const float *x = op->x + r * op->x_width;
    if (is_integer(op)) {
        qs_acts acts = acts_at(memory, op, rows);
        int64_t parts = op->k / op->act_group;
        job->kernels->quantize(op, x, acts.codes + r * op->k, acts.scales + r * parts, acts.sums + r * parts);
    } else
        job->kernels->round_input(op, x, (float *)memory + r * op->k);
}

static int32_t row_pieces(int32_t rows)
{
    return (rows + ROW_PIECE - 1) / ROW_PIECE;
}

static void run_linear(const struct job *job, qs_pool *pool, int32_t thread, struct phase *phase, const qs_linear *op,
                       int32_t rows)
{
    int32_t tiles = (op->n + QS_LANES - 1) / QS_LANES, pieces = (tiles + TILES - 1) / TILES, mine = 0;
    int rounded = op->act_dtype != QS_F32;
    uint8_t *own = job->scratch + job->thread_bytes * thread, *unpacked = own + job->row_bytes;
    uint8_t *memory = rows == 1 ? own : job->scratch + job->thread_bytes * pool->threads;
    if (rounded && rows == 1) {
        /* Every thread rounds it for itself: cheaper than to wait. Where the others go on meanwhile and the row changes,
         * there is no piece left for this one. */
        if (atomic_load_explicit(&phase[1].next, memory_order_relaxed) < pieces)
            round_row(job, op, memory, 1, 0);
    } else if (rounded) {
        for (int32_t piece; (piece = take(phase)) < row_pieces(rows); mine++)
            for (int64_t r = piece * ROW_PIECE; r < rows && r < (piece + 1) * ROW_PIECE; r++)
                round_row(job, op, memory, rows, r);
        settle(pool, phase, row_pieces(rows), mine);
    }
    mine = 0;
    for (int32_t piece; (piece = take(phase + 1)) < pieces; mine++) {
        int32_t tile = piece * TILES, some = tiles - tile < TILES ? tiles - tile : TILES;
        if (is_integer(op)) {
            qs_acts acts = acts_at(memory, op, rows);
            job->kernels->linear_int(op, &acts, rows, tile, some, unpacked);
        } else
            job->kernels->linear_float(op, rounded ? (const float *)memory : op->x, rows, tile, some,
                                       (float *)unpacked);
    }
    settle(pool, phase + 1, pieces, mine);
}

/* A piece of work is a key head of a sequence and a few of its tokens: as many as make full query rows. */
static void run_attention(const struct job *job, qs_pool *pool, struct phase *phase, const qs_attention *op)
{
    const qs_step *step = job->step;
    int32_t group = op->heads / op->kv_heads, dim = op->head_dim, width = (op->heads + 2 * op->kv_heads) * dim;
    int32_t heads = group < QS_MAX_QUERY_ROWS ? group : QS_MAX_QUERY_ROWS;
    int32_t tokens = QS_MAX_QUERY_ROWS / heads, splits = (group + heads - 1) / heads;
    int32_t sequence = 0, before = 0, pieces = 0, mine = 0;
    for (int32_t piece;; mine++) {
        piece = take(phase);
        for (; sequence < step->sequences; sequence++, before += pieces) {
            int32_t length = step->seq_start[sequence + 1] - step->seq_start[sequence];
            pieces = (length + tokens - 1) / tokens * op->kv_heads * splits;
            if (piece < before + pieces)
                break;
        }
        if (sequence == step->sequences)
            break;
        int32_t at = piece - before, kv_head = at % op->kv_heads, split = at / op->kv_heads % splits;
        int32_t start = step->seq_start[sequence] + at / op->kv_heads / splits * tokens;
        qs_queries queries;
        queries.count = 0;
        for (int32_t t = start; t < start + tokens && t < step->seq_start[sequence + 1]; t++)
            for (int32_t h = split * heads; h < group && h < (split + 1) * heads; h++) {
                int32_t i = queries.count++, head = kv_head * group + h, position = step->positions[t];
                queries.q[i] = op->qkv + (int64_t)t * width + (int64_t)head * dim;
                queries.out[i] = op->out + ((int64_t)t * op->heads + head) * dim;
                queries.last[i] = position;
                queries.first[i] = op->window > 0 && position >= op->window ? position - op->window + 1 : 0;
            }
        job->kernels->attend(op, &queries, step->block_tables + (int64_t)sequence * step->table_stride, kv_head);
    }
    settle(pool, phase, before, mine); /* of all sequences, now that there is no further piece */
}

static void embed_row(const qs_embed *op, int32_t token, float *out)
{
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
}

static void run_row(const struct job *job, const qs_op *op, int64_t r)
{
    const qs_kernels *kernels = job->kernels;
    const qs_step *step = job->step;
    switch (op->kind) {
    case QS_EMBED:
        embed_row(&op->embed, step->token_ids[r], op->embed.out + r * op->embed.width);
        break;
    case QS_RMSNORM:
        kernels->rmsnorm(op->rmsnorm.x + r * op->rmsnorm.width, op->rmsnorm.weight,
                         op->rmsnorm.out + r * op->rmsnorm.width, op->rmsnorm.width, op->rmsnorm.eps);
        break;
    case QS_ROPE_KV: {
        int64_t width = (int64_t)(op->rope_kv.heads + 2 * op->rope_kv.kv_heads) * op->rope_kv.head_dim;
        kernels->rope_kv(&op->rope_kv, op->rope_kv.qkv + r * width, step->positions[r], step->slots[r]);
        break;
    }
    case QS_SILU_MUL: {
        const float *gate = op->silu_mul.gate_up + 2 * r * op->silu_mul.width;
        kernels->silu_mul(gate, gate + op->silu_mul.width, op->silu_mul.out + r * op->silu_mul.width,
                          op->silu_mul.width);
        break;
    }
    case QS_GATHER:
        memcpy(op->gather.out + r * op->gather.width,
               op->gather.x + (int64_t)step->logit_rows[r] * op->gather.width,
               sizeof(float) * (size_t)op->gather.width);
        break;
    case QS_ARGMAX:
        op->argmax.out[r] = kernels->argmax(op->argmax.x + r * op->argmax.width, op->argmax.width);
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
        struct phase *phase = pool->phases + 2 * i;
        int32_t rows = op->rows == QS_ROWS_LOGITS ? job->step->logits : job->step->tokens, mine = 0;
        if (rows == 0)
            continue;
        if (op->kind == QS_LINEAR)
            run_linear(job, pool, thread, phase, &op->linear, rows);
        else if (op->kind == QS_ATTENTION)
            run_attention(job, pool, phase, &op->attention);
        else {
            for (int32_t piece; (piece = take(phase)) < row_pieces(rows); mine++)
                for (int32_t r = piece * ROW_PIECE; r < rows && r < (piece + 1) * ROW_PIECE; r++)
                    run_row(job, op, r);
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

int32_t qs_best_isa(void)
{
#ifdef QS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return QS_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) /* f16c is older than avx2 */
        return QS_AVX2;
#elif defined(QS_ARM)
    if (qs_has_dot_products())
        return QS_NEON;
#endif
    return QS_SCALAR;
}

int32_t qs_op_size(void)
{
    return (int32_t)sizeof(qs_op);
}

static const qs_kernels *kernels_of(int32_t isa)
{
    if (isa < 0 || isa > qs_best_isa())
        return NULL;
#ifdef QS_X86
    if (isa == QS_AVX2)
        return &qs_kernels_avx2;
    if (isa == QS_AVX512)
        return &qs_kernels_avx512;
#elif defined(QS_ARM)
    if (isa == QS_NEON)
        return &qs_kernels_neon;
#endif
    return isa == QS_SCALAR ? &qs_kernels_scalar : NULL;
}

int32_t qs_has_isa(int32_t isa)
{
    return kernels_of(isa) != NULL;
}

int32_t qs_search_scales(const qs_scale_search *op, int64_t first, int64_t rows, int32_t isa)
{
    const qs_kernels *kernels = kernels_of(isa);
    for (int64_t row = first; kernels && row < first + rows; row++)
        kernels->search_scale(op, row);
    return kernels ? 0 : -1;
}

int32_t qs_run(const qs_op *ops, int32_t count, const qs_step *step, qs_pool *pool, void *scratch, int32_t isa)
{
    struct job job = {ops, count, step, kernels_of(isa), scratch, 0, 0};
    if (!job.kernels)
        return -1;
    qs_cpus before;
    if (count > pool->capacity) {
        struct phase *phases = realloc(pool->phases, sizeof(*phases) * 2 * (size_t)count);
        if (!phases)
            return -2;
        pool->phases = phases;
        pool->capacity = count;
    }
    memset(pool->phases, 0, sizeof(*pool->phases) * 2 * (size_t)count);
    plan_scratch(ops, count, 1, pool->threads, &job.row_bytes, &job.thread_bytes);
    int pinned = pool->cpu >= 0 && qs_pin(pthread_self(), pool->cpu, &before) == 0;
    pool->job = &job;
    atomic_store(&pool->open, 1);
    atomic_fetch_add(&pool->epoch, 1);
    wake(pool, &pool->epoch);
    run_job(pool, 0);
    atomic_store(&pool->open, 0);
    for (int inside; (inside = atomic_load(&pool->inside));) /* they may still look at the job, which ends with this call */
        wait_change(pool, &pool->inside, inside);
    if (pinned)
        qs_unpin(pthread_self(), &before);
    return 0;
}
