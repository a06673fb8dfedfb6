/* Shared by the program runner and the kernels of each ISA. Not part of the contract. */
#ifndef QS_INTERNAL_H
#define QS_INTERNAL_H

#include <math.h>
#include <pthread.h>

#include "qserve.h"

#define BOOK 2 /* a `u4` whose codes stand for numbers of a codebook of one byte */
#define BOOK16 3 /* of two */
#define SMALL 4 /* bytes below 2^QS_SMALL_BITS */
#define QS_SMALL_BITS 6

/* Bytes of a scale of an integer weight. */
static inline int64_t qs_scale_bytes(const qs_linear *op)
{
    return op->scale_dtype == QS_F32 ? 4 : op->scale_dtype == QS_F16 ? 2 : 1;
}

/* The input of an integer product by activation groups: codes [groups, rows, act_group], their scales and their sums
 * [groups, rows]. So the rows of a block lie beside each other. `reach`, like sums, where the vectors of an ISA have a
 * HAS_REACH: sums of the positive and of the negative codes, in the even and in the odd pairs of a group, lie no further
 * from 0. */
typedef struct {
    int8_t *codes;
    float *scales;
    int32_t *sums, *reach;
    int64_t rows;
} qs_acts;

/* The rows of one attention work item: query rows q[i] see the keys first[i] .. last[i] (inclusive), in the blocks that
 * tables[i] names. Rows of one sequence follow each other and have the same table. The tables name the same first
 * `shared` blocks, and every row sees all of these. A row's softmax begins with the score top[i] of the weight total[i],
 * which has no value. */
#define QS_MAX_QUERY_ROWS 12
typedef struct {
    const float *q[QS_MAX_QUERY_ROWS];
    float *out[QS_MAX_QUERY_ROWS];
    const int32_t *tables[QS_MAX_QUERY_ROWS];
    int32_t first[QS_MAX_QUERY_ROWS], last[QS_MAX_QUERY_ROWS];
    float top[QS_MAX_QUERY_ROWS], total[QS_MAX_QUERY_ROWS];
    int32_t count, shared;
} qs_queries;

/* The query rows `first` .. first + count - 1 of a sequence, row r being head r % heads of its token r / heads in this
 * step. q and out are those of row 0, and `position` is that of its token. */
#define QS_LATENT_GROUPS 4 /* of QS_LANES rows: the most of a piece, for which a block of keys is converted once */
#define QS_LATENT_SLOTS 256 /* states of chunks that wait to be joined */
#define QS_LATENT_BYTES (384 << 10) /* memory of a thread */
typedef struct {
    const float *q;
    float *out;
    const int32_t *table;
    int32_t position, first, count;
} qs_latent_rows;

/* What QS_LANES rows have gathered so far, dimension by dimension: the weighted values, the highest score, and the total
 * weight, relative to that score. */
typedef struct {
    float sums[QS_LATENT * QS_LANES], top[QS_LANES], total[QS_LANES];
} qs_latent_state;

/* Numbers of a shrunk row: whole tiles. */
static inline int64_t qs_shrunk_stride(const qs_lora *op)
{
    return (op->max_rank + QS_LANES - 1) / QS_LANES * QS_LANES;
}

static inline int64_t qs_delta_width(const qs_gated_delta *op)
{
    return 2 * ((int64_t)op->key_heads * op->key_dim + (int64_t)op->heads * (op->value_dim + 1));
}

/* One table per ISA. Every function handles one work item alone; the program runner splits the work. */
typedef struct {
    void (*rmsnorm)(const float *x, const float *weight, float *out, int32_t width, float eps);
    void (*add_rmsnorm)(const float *x, const float *weight, float *out, int32_t width, float eps);
    void (*layernorm)(const float *x, const float *weight, const float *bias, float *out, int32_t width, float eps);
    /* out = function(x), times `factor` unless it is NULL. */
    void (*activate)(const float *x, const float *factor, float *out, int32_t width, int32_t function);
    void (*soft_cap)(float *x, int32_t width, float cap);
    void (*log_softmax)(float *x, int32_t width);
    int32_t (*argmax)(const float *x, int32_t width);
    /* One token; `memory` has 14 bytes for each expert. */
    void (*route)(const qs_route *op, const float *logits, int32_t *experts, float *weights, float *memory);
    void (*combine)(const float *parts, const int32_t *rows, const float *weights, int32_t top_k, float *out,
                    int32_t width, int32_t accumulate);
    void (*sigmoid_mul)(const float *gate, float *out, int32_t width, int32_t gates);
    /* Rounds one row of the input: to codes of that row for an integer product, to f32 [k] for a float product. */
    void (*quantize)(const qs_linear *op, const float *x, const qs_acts *acts, int64_t row);
    void (*round_input)(const qs_linear *op, const float *x, float *rounded);
    /* Tiles [tile, tile + tiles) of the product, rows [row, end); `unpacked` holds 4 tiles of u8, from e4m3 of f32. */
    void (*linear_int)(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                       uint8_t *unpacked);
    int32_t int_rows; /* that linear_int takes at a time: a product is cut into parts of a multiple of them */
    void (*linear_float)(const qs_linear *op, const float *x, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                         float *unpacked);
    /* shrunk = scale * A x and out += B shrunk for `rows` neighbours with one adapter; the columns of out begin with a
     * tile of B. Rows of `shrunk` lie qs_shrunk_stride apart. */
    void (*shrink)(const qs_lora *op, const qs_adapter *adapter, const float *x, float *shrunk, int32_t rows);
    void (*expand)(const qs_lora *op, const qs_adapter *adapter, const float *shrunk, float *out, int32_t rows,
                   int32_t tile, int32_t columns);
    /* A key head of one row: the query heads that share it, its key and its value. */
    void (*rope_kv)(const qs_rope_kv *op, float *row, int32_t position, int32_t slot, int32_t kv_head);
    void (*attend)(const qs_attention *op, const qs_queries *queries, int32_t kv_head);
    /* One row: its latent and key, and its queries. */
    void (*latent_kv)(const qs_latent_kv *op, float *kv, const float *q, float *out, int32_t position, int32_t slot);
    /* `memory`: QS_LATENT_BYTES. */
    void (*attend_latent)(const qs_latent_attention *op, const qs_latent_rows *rows, int32_t first, int32_t end,
                          qs_latent_state *states, void *memory);
    void (*finish_latent)(const qs_latent_attention *op, const qs_latent_rows *rows, qs_latent_state *states,
                          int32_t chunks);
    /* Channels first .. last - 1 of a sequence's tokens, the first of which is at x. */
    void (*convolve)(const qs_causal_conv *op, float *x, float *state, int32_t tokens, int32_t begins, int32_t first,
                     int32_t last);
    /* A head of a sequence's tokens, the first of which is at x and out; `state` is that of the head. */
    void (*delta)(const qs_gated_delta *op, const float *x, float *out, float *state, int32_t tokens, int32_t begins,
                  int32_t head);
    void (*search_scale)(const qs_scale_search *op, int64_t row);
    void (*choose_scale)(const qs_scale_choice *op, int64_t row);
    void (*sweep)(const qs_sweep *op, int64_t chunk, float *errors);
    int64_t (*trellis_bytes)(const qs_trellis_sweep *op); /* of its memory */
    void (*trellis_sweep)(const qs_trellis_sweep *op, int64_t panel, void *memory);
    /* A tile of trellis codes, behind the tile `before`, as one of u8. */
    void (*decode)(const uint8_t *own, const uint8_t *before, int32_t inputs, int32_t bits, uint8_t *out);
    int32_t (*draw)(const qs_row_sampling *op, int64_t row); /* -2 without memory */
} qs_kernels;

/* The kernels of an ISA, or NULL where this machine lacks it. */
const qs_kernels *qs_kernels_of(int32_t isa);

extern const qs_kernels qs_kernels_scalar;
#if defined(__x86_64__) || defined(__i386__)
#define QS_X86 1
extern const qs_kernels qs_kernels_avx2;
extern const qs_kernels qs_kernels_avx512;
/* AVX2's kernels with the integer product of AVX-VNNI, in either encoding; only where the compiler knows it. */
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define QS_VNNI 1
extern const qs_kernels qs_kernels_vex, qs_kernels_evex;
void qs_vex_linear_int(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                       uint8_t *unpacked);
void qs_evex_linear_int(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                        uint8_t *unpacked);
#endif
/* AVX-512's kernels with the integer product of AMX: where the system lets a process use it, which Linux is asked for. */
#if defined(__x86_64__) && defined(__linux__) && defined(QS_VNNI)
#define QS_AMX_TILES 1
extern const qs_kernels qs_kernels_amx;
int64_t qs_amx_multiply(int64_t loops);
void qs_amx_linear_int(const qs_linear *op, const qs_acts *acts, int32_t row, int32_t end, int32_t tile, int32_t tiles,
                       uint8_t *unpacked);
#endif
#elif defined(__aarch64__)
#define QS_ARM 1
extern const qs_kernels qs_kernels_neon;
int32_t qs_has_dot_products(void);
#endif

/* A set of CPUs, as large as Linux defines it. */
#define QS_MAX_CPUS 8192
typedef struct {
    unsigned long words[QS_MAX_CPUS / 8 / sizeof(unsigned long)];
} qs_cpus;

/* Lets `thread` run on `cpu` alone. Returns 0, or -1; `before`, unless NULL, gets the CPUs on which it ran before. */
int32_t qs_pin(pthread_t thread, int32_t cpu, qs_cpus *before);
void qs_unpin(pthread_t thread, qs_cpus *before);

/* What the keys, or the values, of a head take in a block of the cache. */
static inline int64_t qs_kv_bytes(int32_t dtype, int32_t dim)
{
    switch (dtype) {
    case QS_F32: return (int64_t)dim * QS_LANES * 4;
    case QS_F16:
    case QS_BF16: return (int64_t)dim * QS_LANES * 2;
    case QS_U4: return ((int64_t)dim / 2 + 4) * QS_LANES;
    }
    return (int64_t)dim * QS_LANES;
}

static inline float qs_half_to_float(uint16_t h)
{
    union { uint32_t u; float f; } magic = {113u << 23}, v;
    uint32_t exponent;
    v.u = (uint32_t)(h & 0x7fff) << 13;
    exponent = v.u & (0x7c00u << 13);
    v.u += (127u - 15u) << 23;
    if (exponent == (0x7c00u << 13))
        v.u += (128u - 16u) << 23;
    else if (exponent == 0) {
        v.u += 1u << 23;
        v.f -= magic.f;
    }
    v.u |= (uint32_t)(h & 0x8000) << 16;
    return v.f;
}

/* Round to nearest even; out of range becomes infinity, NaN stays NaN. */
static inline uint16_t qs_float_to_half(float f)
{
    union { float f; uint32_t u; } v = {f}, denormal = {.u = ((127u - 15u) + (23u - 10u) + 1u) << 23};
    uint32_t sign = v.u & 0x80000000u;
    uint16_t h;
    v.u ^= sign;
    if (v.u >= (127u + 16u) << 23)
        h = v.u > 0x7f800000u ? 0x7e00 : 0x7c00;
    else if (v.u < 113u << 23) {
        v.f += denormal.f;
        h = (uint16_t)(v.u - denormal.u);
    } else {
        uint32_t odd = (v.u >> 13) & 1u;
        v.u += ((uint32_t)(15 - 127) << 23) + 0xfffu + odd;
        h = (uint16_t)(v.u >> 13);
    }
    return h | (uint16_t)(sign >> 16);
}

static inline float qs_bf16_to_float(uint16_t b)
{
    union { uint32_t u; float f; } v = {(uint32_t)b << 16};
    return v.f;
}

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t qs_float_to_bf16(float f)
{
    union { float f; uint32_t u; } v = {f};
    if ((v.u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(v.u >> 16 | 0x40u);
    return (uint16_t)((v.u + 0x7fffu + (v.u >> 16 & 1u)) >> 16);
}

/* The bits of e4m3, moved to where float16 has them, are a 256th of the value, subnormals included. */
static inline float qs_e4m3_to_float(uint8_t code)
{
    float value = qs_half_to_float((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
    return (code & 0x7f) == 0x7f ? NAN : value;
}

/* The nearest e4m3 of |x| <= 448, ties to even. Adding 2^14, whose last bit is worth 2^-9, rounds subnormals. */
static inline float qs_round_e4m3(float x)
{
    union { float f; uint32_t u; } v = {x}, normal, small;
    uint32_t magnitude = v.u & 0x7fffffffu;
    normal.u = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) & 0xfff00000u;
    small.u = magnitude;
    small.f = (small.f + 16384.0f) - 16384.0f;
    v.u = (v.u & 0x80000000u) | (magnitude < 121u << 23 ? small.u : normal.u);
    return v.f;
}

/* Saturates; a value that is not finite becomes NaN. */
static inline uint8_t qs_float_to_e4m3(float x)
{
    union { float f; uint32_t u; } v = {x};
    uint32_t sign = v.u >> 24 & 0x80u, finite = (v.u & 0x7fffffffu) < 0x7f800000u;
    v.u &= 0x7fffffffu;
    v.f = qs_round_e4m3(v.f > 448.0f ? 448.0f : v.f);
    uint32_t code = v.u < 121u << 23 ? (uint32_t)(v.f * 512.0f) : (v.u >> 20) - (120u << 3);
    return (uint8_t)(finite ? sign | code : 0x7f);
}

#endif
