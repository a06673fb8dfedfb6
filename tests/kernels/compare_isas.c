/* Compares the kernels of one ISA with the scalar ones on random operations of odd shapes: for machines that have no
 * Python with torch. They agree but for the last bits of sums, and NaN equals NaN, whatever its bits.
 *
 * compare_isas ISA CASES: exit 0 where all agree, 1 where one does not, 2 where this machine lacks the ISA. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qserve.h"

#define THREADS 2

static uint64_t state = 88172645463325252u;
static qs_pool *pool;
static int32_t isa;

static uint32_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static int32_t between(int32_t low, int32_t high)
{
    return low + (int32_t)(next() % (uint32_t)(high - low + 1));
}

/* Mostly ordinary; one in `rare` is a number that is hard to get right. */
static float number(int32_t rare)
{
    static const float hard[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-42f, -1e-42f, 3e38f, -3e38f, 1e-30f, 9e-31f};
    if (rare && next() % (uint32_t)rare == 0)
        return hard[next() % (sizeof hard / sizeof *hard)];
    return ((float)(next() & 0xffff) / 32768.0f - 1.0f) * (next() % 8 ? 1.0f : 40.0f);
}

static void *room(int64_t bytes)
{
    void *memory = malloc((size_t)(bytes ? bytes : 1));
    if (!memory)
        exit(3);
    return memory;
}

static float *numbers(int64_t count, int32_t rare)
{
    float *values = room(count * 4);
    for (int64_t i = 0; i < count; i++)
        values[i] = number(rare);
    return values;
}

static uint8_t *bytes(int64_t count)
{
    uint8_t *values = room(count);
    for (int64_t i = 0; i < count; i++)
        values[i] = (uint8_t)next();
    return values;
}

static float *scales(int64_t count)
{
    float *values = room(count * 4);
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)(1 + next() % 1000) * 1e-4f;
    return values;
}

/* `count` values of a dtype: floats of all kinds, or any bytes. */
static void *values_of(int32_t dtype, int64_t count, int32_t rare)
{
    if (dtype == QS_F32)
        return numbers(count, rare);
    if (dtype != QS_F16 && dtype != QS_BF16)
        return bytes(count);
    uint16_t *values = room(count * 2);
    for (int64_t i = 0; i < count; i++) /* f16: an exponent below 8, so that sums of products stay numbers */
        values[i] = (uint16_t)(dtype == QS_BF16 ? 0x3f00u | (next() & 0x80ffu) : next() & 0xc3ffu);
    return values;
}

static void run(qs_op *ops, int32_t count, const qs_step *step, int32_t which)
{
    int32_t rows = step->tokens > step->logits ? step->tokens : step->logits;
    int64_t need = qs_scratch_bytes(ops, count, rows, THREADS);
    uint8_t *memory = room(need + 64);
    void *aligned = (void *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    if (qs_run(ops, count, step, pool, aligned, which))
        exit(2);
    free(memory);
}

/* Numbers agree but for 1e-5 of them and `slack`, and NaN is NaN in both. Where sums overflow (an infinite slack) they only
 * are no ordinary numbers in either. */
static void agree(const char *what, const float *a, const float *b, int64_t count, float slack)
{
    for (int64_t i = 0; i < count; i++) {
        int numbers = isfinite(a[i]) && isfinite(b[i]);
        if (numbers ? fabsf(a[i] - b[i]) <= 1e-5f * fabsf(b[i]) + slack
                    : (isnan(a[i]) == isnan(b[i]) || isinf(slack)) && !(fabsf(a[i]) < 1e30f) && !(fabsf(b[i]) < 1e30f))
            continue;
        fprintf(stderr, "%s: %lld of %lld is %.9g and not %.9g\n", what, (long long)i, (long long)count, a[i], b[i]);
        exit(1);
    }
}

/* The largest finite magnitude. */
static float largest(const float *x, int64_t count)
{
    float most = 0;
    for (int64_t i = 0; i < count; i++)
        most = isfinite(x[i]) && fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

static qs_step plain_step(int32_t rows)
{
    return (qs_step){.tokens = rows, .logits = rows};
}

static void linear(void)
{
    static const int32_t floats[] = {QS_F32, QS_F16, QS_BF16, QS_F8};
    int32_t rows = between(1, 11), integer = between(0, 2) > 0, pad = between(0, 3);
    qs_linear op = {.n = between(1, 150), .accumulate = between(0, 1), .zero = between(0, 200)};
    if (integer) {
        op.dtype = between(0, 1) ? QS_U4 : QS_U8;
        op.act_dtype = QS_I8;
        op.act_group = 8 * between(1, 9);
        op.group = op.act_group * between(1, 3);
        op.k = op.group * between(1, 4);
        op.act_span = between(0, 1) ? op.k : op.act_group * between(1, 3);
        op.x_width = between(0, 2) ? op.k : between(1, op.k);
    } else {
        op.dtype = floats[between(0, 3)];
        op.act_dtype = between(0, 1) ? QS_F32 : between(0, 1) ? QS_I8 : QS_F8;
        op.k = op.x_width = between(1, 130);
        op.group = between(1, op.k);
        op.act_span = between(1, op.k);
    }
    int32_t tiles = (op.n + QS_LANES - 1) / QS_LANES, groups = (op.k + op.group - 1) / op.group;
    int64_t cells = (int64_t)tiles * op.k * QS_LANES;
    uint8_t *weight = values_of(op.dtype, op.dtype == QS_U4 ? cells / 2 : cells, 0);
    if (op.dtype == QS_F8)
        for (int64_t i = 0; i < cells; i++)
            weight[i] = (weight[i] & 0x7f) == 0x7f ? 0 : weight[i];
    if (!op.accumulate && between(0, 1)) {
        op.function = between(QS_SILU, QS_SWIGLUOAI);
        op.gated = op.n % (2 * QS_LANES) == 0;
    } else if (!op.accumulate && between(0, 1))
        op.cap = 30;
    int32_t rare = op.function || op.cap > 0 || between(0, 1) ? 0 : 40; /* a sum that overflows has a finite cap */
    float *x = numbers((int64_t)rows * op.x_width, rare), *steps = scales((int64_t)tiles * groups * QS_LANES);
    float *bias = numbers(op.n, 0);
    uint8_t *codebook = bytes(32);
    op.codebook_bytes = between(1, 2);
    for (int32_t i = 0; i < 16 && op.codebook_bytes == 1; i++)
        codebook[i] &= 31;
    float *row_scales = scales((int64_t)tiles * QS_LANES), *zeros = numbers((int64_t)tiles * groups * QS_LANES, 0);
    int32_t *order = room((int64_t)op.k * 4);
    for (int32_t i = 0; i < op.k; i++)
        order[i] = between(-1, op.x_width - 1);
    op.out_stride = op.n + pad;
    op.x_stride = op.k;
    op.x = x;
    op.weight = weight;
    op.scales = steps;
    if (integer) {
        op.scale_dtype = between(0, 1) ? QS_F8 : QS_F32;
        for (int32_t i = 0; i < tiles * groups * QS_LANES && op.scale_dtype == QS_F8; i++)
            ((uint8_t *)steps)[i] &= 0x3f;
        op.row_scales = between(0, 1) ? row_scales : NULL;
    }
    op.bias = between(0, 1) ? bias : NULL;
    op.codebook = op.dtype == QS_U4 && between(0, 1) ? codebook : NULL;
    op.zeros = integer && op.scale_dtype == QS_F32 && between(0, 1) ? zeros : NULL;
    op.permutation = integer && between(0, 3) == 0 ? order : NULL;
    for (int32_t i = 0; i < tiles * groups * QS_LANES && op.codebook && op.codebook_bytes == 2; i++)
        steps[i] /= 256;
    op.input_scale = between(0, 3) ? 0.0f : 0.02f;
    int64_t size = (int64_t)rows * op.out_stride;
    float *first = numbers(size, 0), *second = room(size * 4);
    memcpy(second, first, (size_t)size * 4);
    qs_step step = plain_step(rows);
    qs_op mine = {.kind = QS_LINEAR, .linear = op}, theirs = mine;
    mine.linear.out = first;
    theirs.linear.out = second;
    run(&mine, 1, &step, isa);
    run(&theirs, 1, &step, QS_SCALAR);
    char what[200];
    snprintf(what, sizeof what, "linear of dtype %d, rows %d, n %d, k %d, group %d, act_dtype %d, span %d, act_group %d",
             op.dtype, rows, op.n, op.k, op.group, op.act_dtype, op.act_span, op.act_group);
    for (int32_t r = 0; r < rows; r++) { /* weights are below 50 */
        float top = largest(x + (int64_t)r * op.x_width, op.x_width), most = (float)op.k * 50 * top;
        agree(what, first + (int64_t)r * op.out_stride, second + (int64_t)r * op.out_stride, op.out_stride,
              top > 1e30f ? INFINITY : 4e-7f * most * (op.function ? 2 * (most + 40) : 1)); /* it may be a square */
    }
    free(weight), free(x), free(steps), free(bias), free(zeros), free(row_scales), free(order), free(first), free(second), free(codebook);
}

/* Row after row: what reads x and writes as much, or less, in place or beside. */
static void row_wise(void)
{
    int32_t rows = between(1, 9), width = between(1, 90);
    float *x = numbers((int64_t)rows * width * 2, between(0, 1) ? 0 : 30), *weight = numbers(width, 0);
    float *first = numbers((int64_t)rows * width, 20), *second = room((int64_t)rows * width * 4);
    memcpy(second, first, (size_t)rows * (size_t)width * 4);
    qs_step step = plain_step(rows);
    for (int32_t both = 0; both < 2; both++) {
        float *out = both ? second : first;
        int32_t which = both ? QS_SCALAR : isa;
        int32_t *best = room((int64_t)rows * 4);
        qs_op ops[] = {
            {.kind = QS_LOG_SOFTMAX, .log_softmax = {out, width}},
            {.kind = QS_ARGMAX, .argmax = {out, best, width}},
        };
        run(ops, 2, &step, which);
        for (int32_t r = 0; r < rows; r++) /* beside the logits, so that one comparison serves */
            out[(int64_t)r * width] = (float)best[r];
        free(best);
    }
    for (int32_t r = 0; r < rows; r++)
        agree("log_softmax and argmax", first + (int64_t)r * width, second + (int64_t)r * width, width,
              1e-5f + 3e-7f * largest(second + (int64_t)r * width, width));
    static const char *const names[] = {"rmsnorm", "layernorm", "activation", "soft_cap"};
    for (int32_t kind = 0; kind < 4; kind++) {
        int32_t accumulate = between(0, 1), function = between(QS_SILU, QS_SWIGLUOAI), gated = between(0, 1);
        for (int32_t both = 0; both < 2; both++) {
            float *out = memcpy(both ? second : first, x, (size_t)rows * (size_t)width * 4);
            qs_op ops[] = {
                {.kind = QS_RMS_NORM, .rms_norm = {x, weight, out, accumulate, width, width, 1e-5f}},
                {.kind = QS_LAYER_NORM, .layer_norm = {x, weight, accumulate ? weight : NULL, out, width, 1e-5f}},
                {.kind = QS_ACTIVATION, .activation = {x, out, function, gated, width, width}},
                {.kind = QS_SOFT_CAP, .soft_cap = {out, width, 30}},
            };
            run(ops + kind, 1, &step, both ? QS_SCALAR : isa);
        }
        for (int32_t r = 0; r < rows; r++) { /* a norm adds to what was there, or subtracts a mean */
            float most = largest(x + (int64_t)r * width, width);
            if (kind < 2 && most > 1e30f)
                continue; /* whether a sum of squares overflows depends on its order */
            agree(names[kind], first + (int64_t)r * width, second + (int64_t)r * width, width,
                  kind > 1 ? 1e-30f : 1e-3f + 1e-5f * most);
        }
    }
    free(x), free(weight), free(first), free(second);
}

/* A few sequences store what is new and attend to all that they have. */
/* Bit for bit, but for those of NaN. */
static void same_cache(int32_t dtype, const void *a, const void *b, int64_t cells)
{
    const uint16_t *first = a, *second = b;
    for (int64_t i = 0; i < cells; i++)
        if (dtype == QS_F32 ? memcmp((const float *)a + i, (const float *)b + i, 4) &&
                                  !(isnan(((const float *)a)[i]) && isnan(((const float *)b)[i]))
            : dtype == QS_F16 ? first[i] != second[i] && ((first[i] & 0x7fff) <= 0x7c00 || (second[i] & 0x7fff) <= 0x7c00)
                              : ((const uint8_t *)a)[i] != ((const uint8_t *)b)[i]) {
            fprintf(stderr, "%lld of %lld in a cache of dtype %d is another\n", (long long)i, (long long)cells, dtype);
            exit(1);
        }
}

/* Softmax hangs on the last bit of a score of 1e38: none of those. */
static void tame(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = isfinite(x[i]) && fabsf(x[i]) > 1e30f ? 1 : x[i];
}

static void attention(void)
{
    static const int32_t dtypes[] = {QS_F32, QS_F16, QS_I8, QS_F8};
    int32_t dtype = dtypes[between(0, 3)], kv_heads = between(1, 3), heads = kv_heads * between(1, 14);
    int32_t dim = between(0, 1) ? 16 * between(1, 5) : between(2, 100), sequences = between(1, 3), rotary = 2 * between(1, dim / 2), over = between(0, 3) == 0;
    int32_t contexts[3], starts[4] = {0}, tokens, blocks = 0, used = 0;
    for (int32_t s = 0; s < sequences; s++) {
        contexts[s] = between(0, 50);
        starts[s + 1] = starts[s] + between(1, 20);
        blocks += (contexts[s] + starts[s + 1] - starts[s] + QS_LANES - 1) / QS_LANES;
    }
    tokens = starts[sequences];
    int32_t *tables = room((int64_t)sequences * blocks * 4), *positions = room(tokens * 4), *slots = room(tokens * 4);
    for (int32_t s = 0; s < sequences; s++) {
        int32_t length = contexts[s] + starts[s + 1] - starts[s], need = (length + QS_LANES - 1) / QS_LANES;
        for (int32_t b = 0; b < need; b++)
            tables[s * blocks + b] = blocks - 1 - used++;
        for (int32_t t = starts[s]; t < starts[s + 1]; t++) {
            positions[t] = contexts[s] + t - starts[s];
            slots[t] = tables[s * blocks + positions[t] / QS_LANES] * QS_LANES + positions[t] % QS_LANES;
        }
    }
    int32_t width = (heads + 2 * kv_heads) * dim, element = dtype == QS_F32 ? 4 : dtype == QS_F16 ? 2 : 1;
    int64_t cells = (int64_t)blocks * kv_heads * dim * QS_LANES, row_cells = (int64_t)tokens * width;
    float *qkv = numbers(row_cells, between(0, 1) ? 0 : 200), *cosine = numbers(90 * rotary, 0), *sine = numbers(90 * rotary, 0);
    float *norm = numbers(heads * dim, 0), *q_scale = numbers(90, 0), *center = numbers(kv_heads * dim, 0), *sinks = numbers(heads, 0), *k_scale = scales(kv_heads), *v_scale = scales(kv_heads);
    void *k = values_of(dtype, cells, 300), *v = values_of(dtype, cells, 300);
    int32_t scaled = dtype == QS_I8 || dtype == QS_F8, normed = between(0, 1), centred = between(0, 1);
    tame(qkv, row_cells);
    if (dtype == QS_F32)
        tame(k, cells), tame(v, cells);
    float *rows[2], *outs[2];
    void *keys[2], *values[2];
    qs_step step = {.positions = positions, .slots = slots, .seq_start = starts, .block_tables = tables,
                    .tokens = tokens, .sequences = sequences, .table_stride = blocks};
    int32_t window = between(0, 1) ? 0 : between(1, 40), sunk = between(0, 1);
    for (int32_t both = 0; both < 2; both++) {
        rows[both] = memcpy(room(row_cells * 4), qkv, (size_t)row_cells * 4);
        keys[both] = memcpy(room(cells * element), k, (size_t)(cells * element));
        values[both] = memcpy(room(cells * element), v, (size_t)(cells * element));
        outs[both] = room((int64_t)tokens * heads * dim * 4);
        qs_op ops[] = {
            {.kind = QS_ROPE_KV,
             .rope_kv = {.qkv = rows[both], .cosine = cosine, .sine = sine, .q_norm = normed ? norm : NULL,
                         .k_norm = normed ? norm : NULL, .k_scale = scaled ? k_scale : NULL,
                         .v_scale = scaled ? v_scale : NULL, .k_center = centred ? center : NULL, .k_cache = keys[both],
                         .q_scale = normed ? q_scale : NULL, .norm_over_heads = normed && over,
                         .v_cache = values[both], .heads = heads, .kv_heads = kv_heads, .head_dim = dim,
                         .rotary_dim = rotary, .kv_dtype = dtype, .eps = 1e-6f}},
            {.kind = QS_ATTENTION,
             .attention = {.qkv = rows[both], .k_scale = scaled ? k_scale : NULL, .v_scale = scaled ? v_scale : NULL,
                           .sinks = sunk ? sinks : NULL, .out = outs[both], .k_cache = keys[both], .v_cache = values[both], .heads = heads,
                           .kv_heads = kv_heads, .head_dim = dim, .kv_dtype = dtype, .window = window, .scale = 0.005f, .softcap = centred ? 3 : 0,
                           .out_stride = heads * dim}},
        };
        run(ops, 2, &step, both ? QS_SCALAR : isa);
    }
    if (normed && over) /* a sum over all heads has another order, and softmax hangs on its last bit */
        agree("norms over all heads", rows[0], rows[1], row_cells, 0.05f);
    else {
        agree("rope", rows[0], rows[1], row_cells, 0);
        same_cache(dtype, keys[0], keys[1], cells);
        same_cache(dtype, values[0], values[1], cells);
        agree("attention", outs[0], outs[1], (int64_t)tokens * heads * dim, 5e-3f);
    }
    for (int32_t both = 0; both < 2; both++)
        free(rows[both]), free(outs[both]), free(keys[both]), free(values[both]);
    free(tables), free(positions), free(slots), free(qkv), free(cosine), free(sine), free(norm), free(q_scale), free(center);
    free(k_scale), free(v_scale), free(k), free(v), free(sinks);
}

/* One sequence, sometimes with a second chunk of keys, and the products of heads before it. */
static void latents(void)
{
    static const int32_t dtypes[] = {QS_F32, QS_F16, QS_BF16};
    int32_t dtype = dtypes[between(0, 2)], heads = between(1, 21), rank = between(1, 70), rope = 2 * between(1, 5);
    int32_t nope = between(1, 40), width = rank + rope, context = between(0, 9) ? between(0, 60) : QS_LATENT_CHUNK - 3;
    int32_t tokens = between(1, 9), starts[] = {0, tokens}, blocks = (context + tokens + QS_LANES - 1) / QS_LANES;
    int32_t tiles = (rank + QS_LANES - 1) / QS_LANES, *tables = room(blocks * 4), *positions = room(tokens * 4);
    int64_t cells = (int64_t)blocks * QS_LANES * width, weights = (int64_t)heads * tiles * nope * QS_LANES;
    for (int32_t b = 0; b < blocks; b++)
        tables[b] = blocks - 1 - b;
    for (int32_t t = 0; t < tokens; t++)
        positions[t] = context + t;
    float *x = numbers((int64_t)tokens * heads * nope, 0), *q = numbers((int64_t)tokens * heads * width, 0), *rows[2], *outs[2];
    void *cache = values_of(dtype, cells, 0), *weight = values_of(QS_F16, weights, 0);
    qs_step step = {.positions = positions, .seq_start = starts, .block_tables = tables, .tokens = tokens, .sequences = 1,
                    .table_stride = blocks};
    tame(x, (int64_t)tokens * heads * nope);
    for (int32_t both = 0; both < 2; both++) {
        rows[both] = memcpy(room((int64_t)tokens * heads * width * 4), q, (size_t)tokens * (size_t)(heads * width) * 4);
        outs[both] = room((int64_t)tokens * heads * rank * 4);
        qs_op ops[] = {
            {.kind = QS_HEAD_LINEAR,
             .head_linear = {.product = {.x = x, .out = rows[both], .weight = weight, .k = nope, .n = rank, .x_width = nope,
                                         .x_stride = heads * nope, .out_stride = heads * width, .dtype = QS_F16},
                             .heads = heads, .x_head = nope, .out_head = width}},
            {.kind = QS_LATENT_ATTENTION,
             .latent_attention = {.q = rows[both], .out = outs[both], .cache = cache, .heads = heads, .width = width,
                                  .rank = rank, .kv_dtype = dtype, .scale = 0.005f}},
        };
        run(ops, 2, &step, both ? QS_SCALAR : isa);
    }
    agree("products of heads", rows[0], rows[1], (int64_t)tokens * heads * width, 1e-2f);
    agree("attention over latents", outs[0], outs[1], (int64_t)tokens * heads * rank, 5e-3f);
    for (int32_t both = 0; both < 2; both++)
        free(rows[both]), free(outs[both]);
    free(tables), free(positions), free(x), free(q), free(cache), free(weight);
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 3;
    isa = atoi(arguments[1]);
    if (!qs_has_isa(isa))
        return 2;
    pool = qs_pool_create(THREADS, NULL);
    for (int32_t i = atoi(arguments[2]); pool && i > 0; i--) {
        linear();
        row_wise();
        attention();
        latents();
    }
    qs_pool_destroy(pool);
    printf("%s cases agree, best of this machine: %d\n", arguments[2], (int)qs_best_isa());
    return pool ? 0 : 3;
}
