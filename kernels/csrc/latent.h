/* Attention over latents, over vectors. All heads read the same keys, so a lane is a query row: no sum goes across
 * lanes, and the lanes of a row see the same operations whatever their neighbours are. An ISA brings the vectors that
 * rows.h names. */

#define OUTER (PARTS == 1 ? 16 : 4) /* keys or dimensions at a time: as many as have accumulators in registers */
#define STRIDE (QS_LATENT + 16)     /* known at compile time, so that 16 keys need one address */

/* QS_LANES query rows: their numbers, scaled, dimension by dimension, and the last token that each sees. */
typedef struct {
    float q[QS_LATENT * QS_LANES];
    int32_t last[QS_LANES];
} latent_rows;

typedef struct {
    float keys[QS_LANES * STRIDE];
    latent_rows rows[QS_LATENT_GROUPS];
    qs_latent_state chunk[QS_LATENT_GROUPS];
} latent_memory;

_Static_assert(sizeof(latent_memory) <= QS_LATENT_BYTES, "memory for attention over latents");

/* sums[i] += items[i * apart + k * step] * lanes[k], for each k in order. */
INLINE void add_outer(vf sums[OUTER][PARTS], const float *lanes, const float *items, const int apart, const int step,
                      int32_t count)
{
    for (; count > 0; count--, lanes += QS_LANES, items += step) {
        vf by[PARTS];
        UNROLL for (int p = 0; p < PARTS; p++)
            by[p] = load(lanes + p * LANES);
        UNROLL for (int i = 0; i < OUTER; i++) {
            vf item = all(items[i * apart]);
            UNROLL for (int p = 0; p < PARTS; p++)
                sums[i][p] = fused(item, by[p], sums[i][p]);
        }
    }
}

INLINE void read_latents(const qs_latent_attention *op, int64_t block, int32_t tokens, float *keys, const int dtype)
{
    const int32_t width = op->width, whole = width - width % LANES, bytes = dtype == QS_F32 ? 4 : 2;
    const uint8_t *from = (const uint8_t *)op->cache + block * QS_LANES * width * bytes;
    uint8_t rest[QS_LANES * 4] = {0};
    for (int32_t t = 0; t < tokens; t++, from += width * bytes) {
        float *key = keys + t * STRIDE;
        for (int32_t j = 0; j < whole; j += LANES)
            store(key + j, load_floats(from, j, dtype));
        memcpy(rest, from + whole * bytes, (size_t)((width - whole) * bytes));
        if (whole < width)
            store(key + whole, load_floats(rest, 0, dtype));
    }
}

static void pack_rows(const qs_latent_attention *op, const qs_latent_rows *rows, int32_t first, latent_rows *to)
{
    const int32_t count = rows->count - first < QS_LANES ? rows->count - first : QS_LANES;
    const float *q = rows->q + (int64_t)(rows->first + first) * op->width;
    for (int32_t lane = 0; lane < QS_LANES; lane++)
        to->last[lane] = rows->position + (rows->first + first + (lane < count ? lane : count - 1)) / op->heads;
    for (int32_t j = 0; j < op->width; j++)
        for (int32_t lane = 0; lane < QS_LANES; lane++)
            to->q[j * QS_LANES + lane] = lane < count ? q[(int64_t)lane * op->width + j] * op->scale : 0.0f;
}

static void begin_state(qs_latent_state *state, int32_t rank)
{
    memset(state->sums, 0, sizeof(float) * QS_LANES * (size_t)((rank + QS_LANES - 1) / QS_LANES * QS_LANES));
    memset(state->total, 0, sizeof state->total);
    for (int32_t lane = 0; lane < QS_LANES; lane++)
        state->top[lane] = -1e30f;
}

/* The lanes whose last token is not before `token`, a bit for each. */
static uint32_t seeing(const latent_rows *rows, int32_t token)
{
    uint32_t bits = 0;
    for (int32_t lane = 0; lane < QS_LANES; lane++)
        bits |= (uint32_t)(rows->last[lane] >= token) << lane;
    return bits;
}

/* A block of keys, whose first token is `token`. Every lane sees the first `common` keys, none sees `end`. */
static void attend_latents(const float *keys, const latent_rows *rows, qs_latent_state *state, int32_t token, int32_t common,
                           int32_t end, int32_t width, int32_t rank)
{
    float scores[QS_LANES * QS_LANES] __attribute__((aligned(64)));
    uint32_t seen[QS_LANES], risen = 0;
    vf best[PARTS], total[PARTS], shrink[PARTS];
    for (int32_t t = 0; t < end; t += OUTER) {
        vf sums[OUTER][PARTS];
        UNROLL for (int i = 0; i < OUTER; i++)
            UNROLL for (int p = 0; p < PARTS; p++)
                sums[i][p] = all(0.0f);
        add_outer(sums, rows->q, keys + t * STRIDE, STRIDE, 1, width);
        UNROLL for (int i = 0; i < OUTER; i++)
            UNROLL for (int p = 0; p < PARTS; p++)
                store(scores + (t + i) * QS_LANES + p * LANES, sums[i][p]);
    }
    for (int p = 0; p < PARTS; p++)
        best[p] = load(state->top + p * LANES);
    for (int32_t t = 0; t < end; t++) {
        seen[t] = t < common ? 0xffff : seeing(rows, token + t);
        for (int p = 0; p < PARTS; p++)
            best[p] = chosen(seen[t] >> p * LANES, higher(best[p], load(scores + t * QS_LANES + p * LANES)), best[p]);
    }
    for (int p = 0; p < PARTS; p++) {
        vf top = load(state->top + p * LANES);
        risen |= above(best[p], top);
        shrink[p] = exp_lanes(top - best[p]);
        total[p] = load(state->total + p * LANES) * shrink[p];
        store(state->top + p * LANES, best[p]);
    }
    for (int32_t j = 0; risen && j < rank; j++)
        for (int p = 0; p < PARTS; p++)
            store(state->sums + j * QS_LANES + p * LANES, load(state->sums + j * QS_LANES + p * LANES) * shrink[p]);
    for (int32_t t = 0; t < end; t++)
        for (int p = 0; p < PARTS; p++) {
            float *score = scores + t * QS_LANES + p * LANES;
            vf weight = chosen(seen[t] >> p * LANES, exp_lanes(load(score) - best[p]), all(0.0f));
            total[p] = total[p] + weight;
            store(score, weight);
        }
    for (int p = 0; p < PARTS; p++)
        store(state->total + p * LANES, total[p]);
    for (int32_t j = 0; j < rank; j += OUTER) {
        float *of = state->sums + j * QS_LANES;
        vf sums[OUTER][PARTS];
        UNROLL for (int i = 0; i < OUTER; i++)
            UNROLL for (int p = 0; p < PARTS; p++)
                sums[i][p] = load(of + i * QS_LANES + p * LANES);
        add_outer(sums, scores, keys + j, 1, STRIDE, common);
        for (int32_t t = common; t < end; t++) /* values that a lane does not see may be infinite */
            UNROLL for (int i = 0; i < OUTER; i++)
                UNROLL for (int p = 0; p < PARTS; p++) {
                    vf more = fused(all(keys[t * STRIDE + j + i]), load(scores + t * QS_LANES + p * LANES), sums[i][p]);
                    sums[i][p] = chosen(seen[t] >> p * LANES, more, sums[i][p]);
                }
        UNROLL for (int i = 0; i < OUTER; i++)
            UNROLL for (int p = 0; p < PARTS; p++)
                store(of + i * QS_LANES + p * LANES, sums[i][p]);
    }
}

/* Joins what a later chunk gathered for the lanes of `seen`. */
static void merge_latents(qs_latent_state *state, const qs_latent_state *later, uint32_t seen, int32_t rank)
{
    for (int p = 0; p < PARTS; p++) {
        const int at = p * LANES;
        uint32_t bits = seen >> at;
        vf a = load(state->top + at), b = load(later->top + at), top = higher(a, b);
        vf of_a = exp_lanes(a - top), of_b = exp_lanes(b - top), total = load(state->total + at);
        store(state->top + at, chosen(bits, top, a));
        store(state->total + at, chosen(bits, fused(load(later->total + at), of_b, total * of_a), total));
        for (int32_t j = at; j < rank * QS_LANES; j += QS_LANES) {
            vf sum = load(state->sums + j);
            store(state->sums + j, chosen(bits, fused(load(later->sums + j), of_b, sum * of_a), sum));
        }
    }
}

/* The chunks first .. end - 1 of the keys for some rows, joined in their order: a state for each QS_LANES rows. */
static void attend_latent(const qs_latent_attention *op, const qs_latent_rows *rows, int32_t first, int32_t end,
                          qs_latent_state *states, void *scratch)
{
    latent_memory *memory = scratch;
    const int32_t groups = (rows->count + QS_LANES - 1) / QS_LANES, blocks = QS_LATENT_CHUNK / QS_LANES;
    memset(memory->keys, 0, sizeof memory->keys); /* also behind the keys of a block, where nobody looks */
    for (int32_t g = 0; g < groups; g++)
        pack_rows(op, rows, g * QS_LANES, memory->rows + g);
    for (int32_t chunk = first; chunk < end; chunk++) {
        qs_latent_state *into = chunk == first ? states : memory->chunk;
        for (int32_t g = 0; g < groups; g++)
            begin_state(into + g, op->rank);
        const int32_t final = memory->rows[groups - 1].last[QS_LANES - 1] / QS_LANES;
        for (int32_t block = chunk * blocks; block < (chunk + 1) * blocks && block <= final; block++) {
            const int32_t token = block * QS_LANES, ends = memory->rows[groups - 1].last[QS_LANES - 1] - token + 1;
            const int32_t tokens = ends < QS_LANES ? ends : QS_LANES;
            switch (op->kv_dtype) {
            case QS_F32: read_latents(op, rows->table[block], tokens, memory->keys, QS_F32); break;
            case QS_F16: read_latents(op, rows->table[block], tokens, memory->keys, QS_F16); break;
            case QS_BF16: read_latents(op, rows->table[block], tokens, memory->keys, QS_BF16); break;
            }
            for (int32_t g = 0; g < groups; g++) {
                const latent_rows *lanes = memory->rows + g;
                int32_t common = lanes->last[0] - token + 1, upto = lanes->last[QS_LANES - 1] - token + 1;
                common = common < 0 ? 0 : common < tokens ? common : tokens;
                if (upto > 0)
                    attend_latents(memory->keys, lanes, into + g, token, common, upto < tokens ? upto : tokens,
                                   op->width, op->rank);
            }
        }
        for (int32_t g = 0; g < groups && chunk > first; g++)
            merge_latents(states + g, into + g, seeing(memory->rows + g, chunk * QS_LATENT_CHUNK), op->rank);
    }
}

/* What up to QS_LANES rows gathered from `chunks` chunks, one state each, as outputs. */
static void finish_latent(const qs_latent_attention *op, const qs_latent_rows *rows, qs_latent_state *states,
                          int32_t chunks)
{
    for (int32_t chunk = 1; chunk < chunks; chunk++) {
        uint32_t seen = 0;
        for (int32_t lane = 0; lane < rows->count; lane++)
            seen |= (uint32_t)(rows->position + (rows->first + lane) / op->heads >= chunk * QS_LATENT_CHUNK) << lane;
        merge_latents(states, states + chunk, seen, op->rank);
    }
    float *out = rows->out + (int64_t)rows->first * op->rank, means[QS_LANES];
    for (int32_t j = 0; j < op->rank; j++) {
        for (int p = 0; p < PARTS; p++)
            store(means + p * LANES, load(states->sums + j * QS_LANES + p * LANES) / load(states->total + p * LANES));
        for (int32_t lane = 0; lane < rows->count; lane++)
            out[(int64_t)lane * op->rank + j] = means[lane];
    }
}
