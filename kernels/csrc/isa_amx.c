/* AMX, products of tiles: the integer product for the kernels of AVX-512. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "internal.h"

#ifdef QS_AMX_TILES
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,prefer-vector-width=512,amx-tile,amx-int8")
#endif
#pragma GCC diagnostic ignored "-Wunused-function"

#define QS_NAME(name) qs_tiles_##name
#include "amx_tiles.h"
#include "portable.h"
#include "avx512_vectors.h"
#include "rows.h"
#include "store_tiles.h"

#define TILES 4        /* weight tiles, at most */
#define STRIP QS_LANES /* rows of a tile */
#define BLOCK 64       /* rows: their inputs of a chunk and those of a weight tile stay in the first-level cache */
#define CHUNK 512      /* inputs, at most, unless a group has more */
#define SMALLEST 16    /* inputs of a group: smaller ones are faster in vectors */
#define GROUPS (CHUNK / SMALLEST)
#define LATER 3        /* groups: what a tile stores is read so much later, when it has left the processor's queues */
#define RING 4         /* of dots: more than LATER, a power of two */

/* How codes become numbers: bytes with a sign, from which the zero point is taken before; bytes without, from whose dots
 * it is taken; two planes of the latter, high bytes first. */
enum { SIGNED, LIFTED, WIDE };

/* Numbers of the tiles in registers: dots of an even and an odd group, inputs and weights. Those of the last strip, which
 * has fewer rows, are apart. */
#define EVEN 0
#define ODD 1
#define INPUTS 2
#define LAST_EVEN 3
#define LAST_ODD 4
#define LAST_INPUTS 5
#define WEIGHTS 6

static void shape_tiles(int32_t last_rows, int32_t inputs)
{
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i <= WEIGHTS; i++) {
        shapes.rows[i] = (uint8_t)(i == WEIGHTS ? inputs / 4 : i >= LAST_EVEN ? last_rows : STRIP);
        shapes.bytes[i] = (uint16_t)(i == INPUTS || i == LAST_INPUTS ? inputs : 64);
    }
    written(&shapes);
    _tile_loadconfig(&shapes);
}

/* Inputs that a tile takes of an activation group: the most that divide it, or 0. */
static int32_t inputs_of_tile(int32_t group)
{
    for (int32_t inputs = 64; inputs >= SMALLEST; inputs -= 4)
        if (group % inputs == 0)
            return inputs;
    return 0;
}

/* Some groups of some strips by a weight tile. */
typedef struct {
    const int8_t *x;       /* [groups][rows of all][width] */
    const float *x_scales; /* [groups][rows of all] */
    const int32_t *x_sums;
    const uint8_t *w;      /* [planes][inputs / 4][16][4] */
    const float (*scales)[QS_LANES], (*zeros)[QS_LANES]; /* [groups][16]; zeros may be NULL */
    float *sums;           /* [rows][apart] */
    int64_t x_rows, apart, plane;
    int32_t strips, groups, width, tile_inputs, zero, begins; /* begins: whether the sums are 0 before */
} strips_of;

/* The dots of a group of a strip with a plane of weights, to a tile. */
#define MULTIPLY(dots, inputs)                                                                          \
    do {                                                                                                \
        const int8_t *x = at->x + (g * at->x_rows + strip * STRIP) * at->width, *end = x + at->width;   \
        const uint8_t *w = plane + (int64_t)g * at->width * QS_LANES;                                   \
        _tile_zero(dots);                                                                               \
        for (; x < end; x += at->tile_inputs, w += at->tile_inputs * QS_LANES) {                        \
            _tile_loadd(WEIGHTS, w, 64);                                                                \
            _tile_loadd(inputs, x, at->width);                                                          \
            if (kind == SIGNED)                                                                         \
                _tile_dpbssd(dots, inputs, WEIGHTS);                                                    \
            else                                                                                        \
                _tile_dpbsud(dots, inputs, WEIGHTS);                                                    \
        }                                                                                               \
    } while (0)

INLINE void multiply(const strips_of *at, int32_t strip, int32_t g, const uint8_t *plane, const int odd, const int last,
                     const int kind)
{
    if (last && odd)
        MULTIPLY(LAST_ODD, LAST_INPUTS);
    else if (last)
        MULTIPLY(LAST_EVEN, LAST_INPUTS);
    else if (odd)
        MULTIPLY(ODD, INPUTS);
    else
        MULTIPLY(EVEN, INPUTS);
}

INLINE void store_dots(int32_t *dots, const int odd, const int last)
{
    if (last && odd)
        _tile_stored(LAST_ODD, dots, 64);
    else if (last)
        _tile_stored(LAST_EVEN, dots, 64);
    else if (odd)
        _tile_stored(ODD, dots, 64);
    else
        _tile_stored(EVEN, dots, 64);
}

/* Scales the dots of a group of a strip, and adds them to the sums: as avx512_linear_int.h does, bit for bit. Rows that do
 * not exist read what lies behind the others. */
INLINE void add_group(const strips_of *at, int32_t strip, int32_t g, const int32_t *dots, __m512 *sums, const int rows,
                      const int kind)
{
    const float *x_scales = at->x_scales + g * at->x_rows + strip * STRIP;
    const __m512 scale = _mm512_loadu_ps(at->scales[g]);
    const __m512i x_sums = _mm512_loadu_si512(at->x_sums + g * at->x_rows + strip * STRIP);
    int32_t starts[STRIP] __attribute__((aligned(64)));
    float totals[STRIP] __attribute__((aligned(64)));
    __m512 product[STRIP];
    if (kind != SIGNED)
        _mm512_store_si512(starts, _mm512_mullo_epi32(x_sums, _mm512_set1_epi32(-at->zero)));
    UNROLL for (int m = 0; m < rows; m++) {
        __m512i dot = _mm512_load_si512(dots + m * QS_LANES);
        if (kind == WIDE)
            dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 8), _mm512_load_si512(dots + (STRIP + m) * QS_LANES));
        if (kind != SIGNED)
            dot = _mm512_add_epi32(dot, _mm512_set1_epi32(starts[m]));
        product[m] = _mm512_cvtepi32_ps(dot);
    }
    if (at->zeros) {
        const __m512 zero = _mm512_loadu_ps(at->zeros[g]);
        _mm512_store_ps(totals, _mm512_cvtepi32_ps(x_sums));
        UNROLL for (int m = 0; m < rows; m++)
            product[m] = _mm512_fnmadd_ps(zero, _mm512_set1_ps(totals[m]), product[m]);
    }
    UNROLL for (int m = 0; m < rows; m++)
        sums[m] = _mm512_fmadd_ps(_mm512_mul_ps(product[m], scale), _mm512_set1_ps(x_scales[m]), sums[m]);
}

/* Where strips are: group g of a strip. */
typedef struct {
    int32_t strip, g;
} place;

INLINE void go_on(const strips_of *at, place *to)
{
    if (++to->g == at->groups)
        to->strip++, to->g = 0;
}

/* Adds the dots of the group at `to` to the sums of its strip, which it loads before the first and stores behind the last. */
INLINE void add_next(const strips_of *at, place *to, const int32_t *dots, __m512 *sums, const int rows, const int kind)
{
    float *kept = at->sums + to->strip * STRIP * at->apart;
    if (to->g == 0)
        UNROLL for (int m = 0; m < rows; m++)
            sums[m] = at->begins ? _mm512_setzero_ps() : _mm512_load_ps(kept + m * at->apart);
    add_group(at, to->strip, to->g, dots, sums, rows, kind);
    if (to->g == at->groups - 1)
        UNROLL for (int m = 0; m < rows; m++)
            _mm512_store_ps(kept + m * at->apart, sums[m]);
    go_on(at, to);
}

/* All groups of a strip, then those of the next. The dots of a group stay in a tile while those of the next are made, and
 * are added LATER: no step waits for the one before. Two planes take both tiles. */
INLINE void multiply_strips(const strips_of *at, const int rows, const int last, const int kind)
{
    int32_t dots[RING][(1 + (kind == WIDE)) * STRIP * QS_LANES] __attribute__((aligned(64)));
    const int32_t count = at->strips * at->groups, step = kind == WIDE ? 1 : 2;
    place made = {0, 0}, added = {0, 0};
    __m512 sums[STRIP];
    UNROLL for (int m = 0; m < rows; m++)
        sums[m] = _mm512_setzero_ps();
    for (int32_t first = 0; first < count + LATER; first += step)
        UNROLL for (int odd = 0; odd < step; odd++) {
            const int32_t i = first + odd;
            if (i < count) {
                multiply(at, made.strip, made.g, at->w, odd, last, kind);
                if (kind == WIDE)
                    multiply(at, made.strip, made.g, at->w + at->plane, 1, last, kind);
                go_on(at, &made);
            }
            if (i >= LATER && i < count + LATER)
                add_next(at, &added, dots[(i - LATER) % RING], sums, rows, kind);
            if (kind == WIDE && i < count) {
                store_dots(dots[i % RING], 0, last);
                store_dots(dots[i % RING] + STRIP * QS_LANES, 1, last);
            } else if (kind != WIDE && i >= 1 && i <= count)
                store_dots(dots[(i - 1) % RING], !odd, last);
        }
}

#define STRIP_KERNEL(name, rows, last, kind)                        \
    static __attribute__((noinline)) void name(const strips_of *at) \
    {                                                               \
        multiply_strips(at, rows, last, kind);                      \
    }
#define STRIP_KERNELS(kind)                   \
    STRIP_KERNEL(kind##_16, 16, 0, kind)      \
    STRIP_KERNEL(kind##_last_4, 4, 1, kind)   \
    STRIP_KERNEL(kind##_last_8, 8, 1, kind)   \
    STRIP_KERNEL(kind##_last_12, 12, 1, kind) \
    STRIP_KERNEL(kind##_last_16, 16, 1, kind)
#define STRIP_TABLE(kind) {kind##_16, kind##_last_4, kind##_last_8, kind##_last_12, kind##_last_16}

STRIP_KERNELS(SIGNED)
STRIP_KERNELS(LIFTED)
STRIP_KERNELS(WIDE)

static void (*const strip_kernels[][5])(const strips_of *at) = {
    [SIGNED] = STRIP_TABLE(SIGNED), [LIFTED] = STRIP_TABLE(LIFTED), [WIDE] = STRIP_TABLE(WIDE),
};

/* `inputs` inputs of a tile, whose codes begin at w, to bytes [planes][inputs / 4][16][4]. Codes `ahead` bytes further are
 * prefetched. */
static void unpack(const qs_linear *op, const uint8_t *w, int32_t inputs, int64_t ahead, uint8_t *out, const int kind)
{
    const __m512i low = _mm512_set1_epi8(15), zero = _mm512_set1_epi8((char)op->zero);
    const int64_t plane = (int64_t)inputs * QS_LANES;
    const uint8_t *book = op->codebook ? op->codebook : (const uint8_t[QS_LANES]){0};
    const __m512i lows = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)book));
    const __m512i highs = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)book + (kind == WIDE)));
    if (op->dtype == QS_U8) {
        for (int64_t i = 0; i < plane; i += 64) {
            _mm_prefetch(w + i + ahead, _MM_HINT_T1);
            _mm512_storeu_si512(out + i, _mm512_sub_epi8(_mm512_loadu_si512(w + i), zero));
        }
        return;
    }
    for (int64_t i = 0; i < plane; i += 128, w += 64) {
        __m512i bytes = _mm512_loadu_si512(w);
        _mm_prefetch(w + ahead, _MM_HINT_T1);
        UNROLL for (int half = 0; half < 2; half++) {
            __m512i codes = _mm512_and_si512(half ? _mm512_srli_epi16(bytes, 4) : bytes, low);
            if (kind == WIDE)
                _mm512_storeu_si512(out + plane + i + 64 * half, _mm512_shuffle_epi8(lows, codes));
            if (op->codebook)
                codes = _mm512_shuffle_epi8(highs, codes);
            _mm512_storeu_si512(out + i + 64 * half, kind == SIGNED ? _mm512_sub_epi8(codes, zero) : codes);
        }
    }
}

static int kind_of(const qs_linear *op)
{
    if (op->codebook && op->codebook_bytes == 2)
        return WIDE;
    if (op->dtype == QS_U4)
        return SIGNED;
    /* A wide group has many inputs for each dot that is lifted. */
    return op->act_group > CHUNK || op->zero > 128 || (1 << op->bits) - 1 - op->zero > 127 ? LIFTED : SIGNED;
}

/* The fewest rows that are faster in tiles than in vectors. */
static int32_t fewest_rows(const qs_linear *op, int kind)
{
    if (op->act_group <= 32) /* half a tile */
        return 28;
    return op->act_group > CHUNK || kind == WIDE ? 7 : 12;
}

/* The scales of a tile's groups [first, first + groups) of activations, or the zero points. */
static void widen(const qs_linear *op, const void *scales, int32_t tile, int32_t first, int32_t groups,
                  float (*out)[QS_LANES])
{
    const int64_t bytes = QS_LANES * qs_scale_bytes(op), each = op->group / op->act_group;
    const uint8_t *from = (const uint8_t *)scales + tile * (op->k / op->group) * bytes;
    for (int32_t g = 0; g < groups; g++)
        store(out[g], load_scales(from + (first + g) / each * bytes, 0, op->scale_dtype));
}

/* At most BLOCK rows from `row` on by `tiles` weight tiles. Codes `ahead` bytes further are prefetched. */
static void multiply_block(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t rows, int32_t tile,
                           int32_t tiles, int64_t ahead, int32_t tile_inputs, uint8_t *unpacked, const int kind)
{
    float sums[BLOCK * TILES * QS_LANES] __attribute__((aligned(64))), scales[GROUPS][QS_LANES], zeros[GROUPS][QS_LANES];
    const int32_t parts = op->k / op->act_group, most = op->act_group < CHUNK ? CHUNK / op->act_group : 1;
    const int32_t chunks = (parts + most - 1) / most, apart = tiles * QS_LANES, bytes = op->dtype == QS_U4 ? 8 : 16;
    for (int32_t c = 0, first = 0, groups; c < chunks; c++, first += groups) {
        groups = (int32_t)((int64_t)parts * (c + 1) / chunks) - first;
        if (c == chunks - 1)
            fetch_block(op, row, tile, rows, tiles);
        const int32_t inputs = groups * op->act_group;
        for (int32_t t = 0; t < tiles; t++) {
            const int64_t begin = (int64_t)(tile + t) * op->k + (int64_t)first * op->act_group;
            const uint8_t *w = (const uint8_t *)op->weight + begin * bytes; /* bytes of an input */
            if (kind != LIFTED)
                unpack(op, w, inputs, ahead, unpacked, kind);
            written(unpacked);
            widen(op, op->scales, tile + t, first, groups, scales);
            if (op->zeros)
                widen(op, op->zeros, tile + t, first, groups, zeros);
            const int64_t at = first * acts->rows + row;
            strips_of strips = {
                .x = acts->codes + at * op->act_group,
                .x_scales = acts->scales + at,
                .x_sums = acts->sums + at,
                .w = kind == LIFTED ? w : unpacked,
                .scales = scales,
                .zeros = op->zeros ? zeros : NULL,
                .sums = sums + t * QS_LANES,
                .x_rows = acts->rows,
                .apart = apart,
                .plane = (int64_t)inputs * QS_LANES,
                .strips = rows / STRIP,
                .groups = groups,
                .width = op->act_group,
                .tile_inputs = tile_inputs,
                .zero = op->zero,
                .begins = c == 0,
            };
            if (strips.strips)
                strip_kernels[kind][0](&strips);
            if (rows % STRIP == 0)
                continue;
            strips.x += (int64_t)strips.strips * STRIP * op->act_group;
            strips.x_scales += strips.strips * STRIP;
            strips.x_sums += strips.strips * STRIP;
            strips.sums += strips.strips * STRIP * apart;
            strips.strips = 1;
            strip_kernels[kind][(rows % STRIP + 3) / 4](&strips);
        }
    }
    for (int32_t i = 0; i < rows * apart && op->row_scales; i += QS_LANES)
        store(sums + i, load(sums + i) * load(op->row_scales + tile * QS_LANES + i % apart));
    for (int32_t r = 0; r < rows; r += STRIP)
        if (rows - r >= STRIP && tiles == TILES)
            store_block(op, sums + r * apart, row + r, tile, STRIP, TILES);
        else
            store_block(op, sums + r * apart, row + r, tile, rows - r < STRIP ? rows - r : STRIP, tiles);
}

/* Products of tiles into four sums; none of it touches memory. Its loops are as many times longer as its tiles. */
int64_t qs_amx_multiply(int64_t loops)
{
    shape_tiles(STRIP, 64);
    _tile_zero(INPUTS);
    _tile_zero(WEIGHTS);
    for (int64_t n = 0; n < loops / 64; n++) {
        _tile_dpbssd(EVEN, INPUTS, WEIGHTS);
        _tile_dpbssd(ODD, INPUTS, WEIGHTS);
        _tile_dpbssd(LAST_EVEN, INPUTS, WEIGHTS);
        _tile_dpbssd(LAST_ODD, INPUTS, WEIGHTS);
    }
    _tile_release();
    return loops / 64 * 4 * STRIP * QS_LANES * 64;
}

void qs_amx_linear_int(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                       uint8_t *unpacked)
{
    const int32_t inputs = inputs_of_tile(op->act_group);
    const int kind = kind_of(op);
    if (end - row < fewest_rows(op, kind) || !inputs) {
        qs_kernels_avx512.linear_int(op, acts, row, end, tile, tiles, unpacked);
        return;
    }
    const int64_t bytes = (int64_t)op->k * (op->dtype == QS_U4 ? 8 : 16) * tiles;
    int64_t ahead = bytes <= NEAR ? bytes : 0; /* the next piece, see avx512_linear_int.h */
    shape_tiles((end - row) % STRIP ? (end - row) % STRIP : STRIP, inputs);
    for (; row < end; row += BLOCK, ahead = 0) /* fetched once */
        multiply_block(op, acts, row, end - row < BLOCK ? end - row : BLOCK, tile, tiles, ahead, inputs, unpacked, kind);
    _tile_release();
    end_streams();
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
#endif
