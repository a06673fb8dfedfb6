/* The contract of the CPU kernels: plain C, no torch, loaded with ctypes.
 *
 * The structure of an operation has the fields of its dataclass in ops.py (tiled.py for embed and linear), and then its
 * properties: pointers first, then integers, then floats. test_abi.py compares them.
 *
 * A model step is a list of operations (a program). It is built once at load and run once per engine step
 * with a qs_step that says which tokens run; every buffer belongs to the caller and is sized for the largest
 * step. All matrices are row-major and contiguous; `rows` of an operation is the number of tokens of the step
 * or the number of its logit rows.
 *
 * Invariance: the value of an output row depends on that row's inputs only. The order of every floating-point
 * sum is fixed by the shape of the weights, never by the number of rows, their place in the batch, or the
 * number of threads.
 *
 * NaN: a row that contains NaN or infinity yields NaN in that row and nowhere else.
 */
#ifndef QSERVE_H
#define QSERVE_H

#include <stdint.h>

#define QS_LANES 16 /* output rows per weight tile, and tokens per KV block */
#define QS_RING 64 /* outputs of a ring of trellis codes */
#define QS_STATE_BITS 12
#define QS_TRELLIS_FACTOR 22929
#define QS_TRELLIS_ZERO 30

enum qs_op_kind {
    QS_EMBED = 0,
    QS_POSITION_EMBED = 1,
    QS_RMS_NORM = 2,
    QS_LAYER_NORM = 3,
    QS_HEAD_NORM = 4,
    QS_CAST = 5,
    QS_LINEAR = 6,
    QS_ROPE_KV = 7,
    QS_ATTENTION = 8,
    QS_ACTIVATION = 9,
    QS_GATHER = 10,
    QS_SOFT_CAP = 11,
    QS_ARGMAX = 12,
    QS_LOG_SOFTMAX = 13,
    QS_ROUTE = 14,
    QS_EXPERTS = 15,
    QS_SIGMOID_MUL = 16,
    QS_LORA = 17,
    QS_ALL_GATHER = 18,
    QS_HEAD_LINEAR = 19,
    QS_LATENT_KV = 20,
    QS_LATENT_ATTENTION = 21,
    QS_CAUSAL_CONV = 22,
    QS_GATED_DELTA = 23,
};

/* QS_F8 is e4m3 of the OCP 8-bit floating point specification: no infinities, the largest value is 448. QS_F4 is e2m1 of
 * its Microscaling Formats: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign. */
enum qs_dtype { QS_F32 = 0, QS_F16 = 1, QS_BF16 = 2, QS_U8 = 3, QS_U4 = 4, QS_F8 = 5, QS_I8 = 6, QS_TRELLIS = 7, QS_F4 = 8 };
/* QS_AVX512 has VNNI, QS_NEON the dot product of Armv8.2. QS_AVXVNNI is QS_AVX2 with VNNI for its vectors,
 * QS_AMX is QS_AVX512 with tiles of bytes and of bfloat16. */
enum qs_isa { QS_SCALAR = 0, QS_AVX2 = 1, QS_AVX512 = 2, QS_NEON = 3, QS_AVXVNNI = 4, QS_AMX = 5 };
/* silu(x) = x / (1 + exp(-x)), gelu by erf or by tanh, relu(x) = max(x, 0), relu2 its square. swigluoai(x) is
 * y / (1 + exp(-1.702 y)) for y = min(x, 7); the factor f of such a gate is min(max(f, -7), 7) + 1. */
enum qs_function {
    QS_NONE = 0, QS_SILU = 1, QS_GELU = 2, QS_GELU_TANH = 3, QS_RELU = 4, QS_RELU2 = 5, QS_SWIGLUOAI = 6
};
enum qs_rows { QS_ROWS_TOKENS = 0, QS_ROWS_LOGITS = 1 };

/* The processes that share a model: `rank` of `size`. counters: memory that all of them share, a line of 16 for each rank
 * (how often it arrived, and how many sleep until it does) and one more, whose first is not 0 once a rank has ended.
 * A size of 1 meets nobody. */
typedef struct { int32_t *counters; int32_t rank, size; } qs_ranks;

/* out[r, :] = table[token_ids[r] - first, :] * scale, for the `tokens` that the table has; rows of other tokens are left
 * as they are. out f32; table [tokens, width] of dtype f32, f16 or bf16, or quantized: u8 is (code - zero) * scale and f8
 * is e4m3 * scale, with scales f32 [tokens, groups], one per `group` columns, and either the constant `zero` (zeros NULL)
 * or zeros u8 [tokens, groups]. */
typedef struct {
    const void *table;
    float *out;
    const float *scales;
    const uint8_t *zeros;
    int32_t width, dtype, tokens, group, zero, first;
    float scale;
} qs_embed;

/* out[r, :] += table[positions[r] + offset, :];  out f32; table [positions, width] of dtype f32, f16 or bf16. */
typedef struct { const void *table; float *out; int32_t offset, width, dtype; } qs_position_embed;

/* out[r, :] = x[r, :] / sqrt(mean(x[r]^2) + eps) * weight, or added to out where `accumulate` is set;  x, out f32
 * [rows, width]. Row r of the output starts at out + r * out_stride. */
typedef struct { const float *x, *weight; float *out; int32_t accumulate, width, out_stride; float eps; } qs_rms_norm;

/* out[r, :] = (x[r, :] - mean(x[r])) / sqrt(variance(x[r]) + eps) * weight + bias;  x, out f32 [rows, width]; bias NULL
 * for none. */
typedef struct { const float *x, *weight, *bias; float *out; int32_t width; float eps; } qs_layer_norm;

/* In place: head h of x [rows, heads * head_dim] becomes that of qs_layer_norm, of its head_dim numbers alone, with the
 * weight [heads * head_dim] and no bias. Row r starts at x + r * x_stride. */
typedef struct { float *x; const float *weight; int32_t head_dim, heads, x_stride; float eps; } qs_head_norm;

/* out[r, :] = x[r, :];  rows of both, of `width` f32, lie x_stride and out_stride apart. */
typedef struct { const float *x; float *out; int32_t width, x_stride, out_stride; } qs_cast;

/* out[r, n] = sum_k x[r, k] W[n, k] + bias[n], or added to out where `accumulate` is set.
 *
 * Weights lie in tiles of 16 output rows (the last is padded with zeros), tile after tile:
 *   f32/f16/bf16  [tile][k][16]
 *   u8            [tile][k / 4][16][4]              byte i of a lane is input 4j + i; below 2^bits
 *   u4            [tile][k / 8][16][4]              low nibble is input 8j + i, high nibble 8j + 4 + i
 *   f8            [tile][k][16]                     none of them NaN
 *   trellis       [tile][k][2 * bits]               bits 2, 3 or 4; k is a multiple of 4
 * The 16 lanes of a trellis are symbols of so many bits, the first in the lowest ones. The symbols of the tile before[t]
 * (i32 [tiles]) precede those of tile t. A lane's state is its symbol behind those before it, QS_STATE_BITS in all, the
 * symbol being the highest. Its code is
 * the sum of the four nibbles of QS_TRELLIS_FACTOR * state mod 2^16, 0 .. 60. Four tiles that hold 64 outputs are a ring,
 * whose last precedes its first. Behind its own a weight may have tiles that only precede others: `tiles` with those.
 * Quantized weights have scales [tile][groups][16], each for `group` inputs, in f32. Those of u8, u4 and trellis are of
 * scale_dtype, f32, f16 or f8 (a 256th of e4m3, without sign), and count times row_scales f32 [tile][16] (NULL for 1).
 * u8, u4 and trellis: W = (code - zero - zeros) * scale, where `zeros` are any numbers, stored as the scales are in f32 or f16, or
 * 0 where NULL. codebook (u8 [codebook_bytes][16], NULL for none; u4 only): the code stands for one of these numbers, of
 * one byte and at most 31, or of two, the low bytes first. f8: W = e4m3 * scale, and the last group may be short.
 *
 * The input is rounded as act_dtype says; `act_span` inputs of a row (the last span may be short) share a scale:
 *   f32  not at all: the product is one of floats. For float and f8 weights.
 *   i8   to round_half_even(x / scale) in -128 .. 127, where scale = max |x| / 127
 *   f8   to e4m3(x / scale), to the nearest, ties to even, where scale = max |x| / 448. For float and f8 weights.
 *   f4   to e2m1(x / scale), ties to even, where scale = e4m3(max |x| / (6 input_scale)) * input_scale (NVFP4)
 * 1 / scale is computed once and multiplied with. Where input_scale > 0 and it is not f4, it is the scale, and values outside the range
 * saturate; a span below 1e-30 is rounded to zeros.
 *
 * These weights take i8 or f4 only, and sum integers (of f4 twice the numbers) over `act_group` inputs. act_group divides `group` and `act_span`,
 * is a multiple of 8, and divides `k`, which the caller pads. |sum| is at most act_group * 255 * 128, so
 * act_group <= 65536 never overflows int32, nor does act_group <= 248 with a codebook of two bytes. Other weights do not
 * read `act_group`.
 *
 * x is [rows, x_width]; row r of the output starts at out + r * out_stride. x_stride is k: rows that a float product
 * reads as they are lie so far apart, and only those of a head lie otherwise. permutation (i32 [k], NULL for none; u8 and
 * u4 only) names the x column of each input, -1 for padding.
 *
 * norm (f32 [x_width], NULL for none): the input is that of qs_rms_norm with this weight and `eps`, or of qs_layer_norm
 * with norm_bias too where `centred` is set.
 *
 * function, unless QS_NONE: of each output, bias included. Where `gated` is set, tiles come in pairs, a gate and its
 * factor, and out[r, 16 t + i] is function(gate) * up of lane i of the tiles 2t and 2t + 1. Then n counts both and is a
 * multiple of 32. cap, unless 0: outputs are those of qs_soft_cap. Accumulate is set with neither.
 */
typedef struct {
    const float *x;
    float *out;
    const void *weight, *scales, *zeros;
    const float *row_scales, *bias, *norm, *norm_bias;
    const int32_t *permutation, *before;
    const uint8_t *codebook;
    int32_t k, n, x_width, x_stride, out_stride, dtype, scale_dtype, group, act_dtype, act_span, act_group, zero,
        codebook_bytes, bits, tiles, accumulate, centred, function, gated;
    float input_scale, eps, cap;
} qs_linear;

/* `product` for each head: rows of its input start at x + h * x_head, those of its output at out + h * out_head, and its
 * tiles, f32, f16 or bf16, follow those of the head before. */
typedef struct {
    qs_linear product;
    int32_t heads, x_head, out_head;
} qs_head_linear;

/* Stores [latent | rotated key] of each token in cache [blocks][16][rank + rope], f32, f16 or bf16. kv f32 [tokens, rank +
 * rope] holds both before the RMS norm of the latent (weight norm f32 [rank]) and before the rotation, and is undefined
 * afterwards. Head h of token t of q, `rope` numbers from q + t * q_stride + h * q_head on, is rotated to where it lies
 * in out. cosine, sine f32 [positions, rope / 2], halves convention. */
typedef struct {
    float *kv;
    const float *norm, *q;
    float *out;
    const float *cosine, *sine;
    void *cache;
    int32_t heads, rank, rope, q_stride, q_head, out_stride, out_head, kv_dtype;
    float eps;
} qs_latent_kv;

/* Causal attention over a cache of latents: all heads of q f32 [tokens, heads, width] share the key of a token, `width`
 * numbers, whose first `rank` are its value. out f32 [tokens, heads, rank]. Keys are attended block after block with a
 * running softmax, in chunks of QS_LATENT_CHUNK tokens, which are then joined in their order. width is at most QS_LATENT. */
#define QS_LATENT 640
#define QS_LATENT_CHUNK 1024
typedef struct {
    const float *q;
    float *out;
    const void *cache;
    int32_t heads, width, rank, kv_dtype;
    float scale;
} qs_latent_attention;

/* Rotates q and k in place (halves convention) and stores k and v in the paged cache.
 * qkv f32 [tokens, (heads + 2 * kv_heads) * head_dim]; cos, sin f32 [positions, rotary_dim / 2];
 * q_norm, k_norm f32 or NULL: RMS norm before the rotation, of each head ([head_dim]), or of all heads together
 * ([heads * head_dim], [kv_heads * head_dim]) where norm_over_heads is set. q_scale f32 [positions], or NULL, multiplies
 * the rotated queries.
 * k_cache [blocks][kv_heads][head_dim][16], v_cache [blocks][kv_heads][16][head_dim], f32, f16, bf16, i8 or
 * f8. i8 and f8 hold k / k_scale and v / v_scale, scales f32 [kv_heads]: i8 rounded half to even and saturated at
 * -127 .. 127, f8 rounded to the nearest, ties to even, and saturated at 448. Values that are not finite become NaN,
 * which i8 writes as -128. k_center f32 [kv_heads, head_dim], or NULL, is subtracted from each rotated key.
 * u4: caches [blocks][kv_heads] of head_dim / 2 * 16 bytes of codes, steps f16 [16] and lows f16 [16], a step and a low
 * for each token. A number is low + step * code; low is the least, and 15 steps reach the greatest. Queries, keys and
 * values are first turned by a Hadamard matrix (kv_cache.h), values in place, too. The codes of k are [head_dim / 2][16],
 * of v [16][head_dim / 2]: element j has the lower half of a byte, element head_dim / 2 + j the upper. head_dim is a
 * multiple of 32. A token with a number that is not finite, or too large for f16, reads as NaN. */
typedef struct {
    float *qkv;
    const float *cosine, *sine;
    void *k_cache, *v_cache;
    const float *q_norm, *k_norm, *k_scale, *v_scale, *k_center, *q_scale;
    int32_t heads, kv_heads, head_dim, rotary_dim, norm_over_heads, kv_dtype;
    float eps;
} qs_rope_kv;

/* Causal attention of each query over the cached keys of its sequence, block after block with a running
 * softmax. window > 0 limits a query to the last `window` positions. A softcap other than 0 makes a score s
 * softcap * tanh(s / softcap). sinks f32 [heads], or NULL: scores without a value. Row r of out, f32 [heads * head_dim],
 * starts at out + r * out_stride.
 * Caches and their scales are those of qs_rope_kv; scales are NULL but for i8 and f8. head_dim is at most 256. With u4,
 * out is turned back. */
typedef struct {
    const float *qkv;
    float *out;
    const void *k_cache, *v_cache;
    const float *k_scale, *v_scale, *sinks;
    int32_t heads, kv_heads, head_dim, window, kv_dtype, out_stride;
    float scale, softcap;
} qs_attention;

/* out[r, j] = function(x[r, j]), or function(x[r, j]) * x[r, width + j] where `gated` is set. Row r of out starts at
 * out + r * out_stride. */
typedef struct { const float *x; float *out; int32_t function, gated, width, out_stride; } qs_activation;

/* In place: x[r, :] = cap * tanh(x[r, :] / cap) */
typedef struct { float *x; int32_t width; float cap; } qs_soft_cap;

/* out[i, :] = x[logit_rows[i], :] */
typedef struct { const float *x; float *out; int32_t width; } qs_gather;

/* out[r] = the first index of the largest value of x[r, :], or -1 where the row holds a NaN. */
typedef struct { const float *x; int32_t *out; int32_t width; } qs_argmax;

/* In place: x[r, :] -= log(sum(exp(x[r, :]))) */
typedef struct { float *x; int32_t width; } qs_log_softmax;

/* Chooses top_k of `count` experts for each row of logits f32 [tokens, count], best first: experts i32 and weights f32
 * [tokens, top_k]. Scores are the softmax of a row, or its sigmoid; the highest score + bias (f32 [count], or NULL) is
 * the best, and of equal ones the first. groups > 1: all come from the top_groups groups with the highest sum of their
 * group_best best. A weight is the score, divided by the sum of the chosen where `renormalize` is set, times scale.
 * Where scores are NaN, experts still differ. */
typedef struct {
    const float *logits;
    int32_t *experts;
    float *weights;
    const float *bias;
    int32_t sigmoid, renormalize, groups, top_groups, group_best, count, top_k;
    float scale;
} qs_route;

/* out[r, :] = sum over j of weights[r, j] * down_e(gate_up_e(x[r])), e = experts[r, j], in the order of j, or added to
 * out where `accumulate` is set. gate_up is gated and has no norm, down reads what it writes and writes parts; both have
 * room for tokens * top_k rows. Their structures are those of the first expert; in weight, scales, zeros, bias and
 * permutation the `held` ones follow each other. gate_up_scales and down_scales f32 [held], or NULL: static input scales.
 * experts i32 and weights f32 [tokens, top_k]; the experts of a token differ.
 *
 * There are `count` experts, and this rank has `held` of them, from `first` on. The other ranks compute the rest: parts
 * and out are memory that all share, and each sums up some rows. */
typedef struct {
    qs_linear gate_up, down;
    qs_ranks ranks;
    const int32_t *experts;
    const float *weights;
    float *out;
    const float *gate_up_scales, *down_scales;
    int32_t count, top_k, accumulate, held, first;
} qs_experts;

/* out[r, j] *= sigmoid(gate[r, j]), or sigmoid(gate[r, 0]) where gates is 1;  gate f32 [rows, gates]. Row r of out starts
 * at out + r * out_stride. */
typedef struct { const float *gate; float *out; int32_t width, gates, out_stride; } qs_sigmoid_mul;

/* The matrices of an adapter for one linear: a [rank / 16][width][16] and b [n / 16][rank][16], tiles as those of
 * qs_linear, f32, f16 or bf16. A rank of 0: the linear stays as it is. */
typedef struct {
    const void *a, *b;
    int32_t rank, a_dtype, b_dtype;
    float scale;
} qs_adapter;

/* out[r, first + i] += scale * sum_j B[i, j] sum_k A[j, k] x[r, k], in f32, for each token r of the step with an adapter
 * (qs_step.adapters) and each of `parts` linears, whose outputs are columns [part][2] = (first, n) of out. No sum
 * depends on other rows. x [rows, width]; row r of out starts at out + r * out_stride. adapters [slot][part]; ranks are
 * at most max_rank. Right behind the product that writes all of out, it is computed with it. */
typedef struct {
    const float *x;
    float *out;
    const qs_adapter *adapters;
    const int32_t *columns;
    int32_t width, out_stride, parts, max_rank;
} qs_lora;

/* out, f32 [rows, width], is memory that all ranks share, and each has written columns or rows of its own. Ends when all
 * have come here: then each sees all of it. */
typedef struct { qs_ranks ranks; float *out; } qs_all_gather;

/* In place, for each sequence: x[t, c] = silu(sum over j of weight[j, c] * input[t - width + 1 + j, c]), the inputs being x
 * before. Row r of x starts at x + r * x_stride; weight f32 [width, channels]. state f32 [slots, width - 1, channels] holds
 * the inputs before the step, oldest first, in the slot state_slots[s] of the step, and then those before the next one.
 * A sequence whose first token has position 0 begins with zeros. */
#define QS_MAX_CONV 8 /* the width at most */
typedef struct {
    float *x;
    const float *weight;
    float *state;
    int32_t width, channels, x_stride;
} qs_causal_conv;

/* For each sequence and head, token by token: the gated delta rule of ops.py. Row r of x holds q and k f32 [key_heads,
 * key_dim], v and z [heads, value_dim], b and a [heads]; row r of out [heads, value_dim] starts at out + r * out_stride.
 * state f32 [slots, heads, key_dim, value_dim] is kept as that of qs_causal_conv; rate and dt_bias [heads], norm
 * [value_dim]. */
#define QS_MAX_KEY_DIM 256
typedef struct {
    const float *x;
    float *out;
    const float *rate, *dt_bias, *norm;
    float *state;
    int32_t key_heads, heads, key_dim, value_dim, out_stride;
    float eps;
} qs_gated_delta;

typedef struct {
    int32_t kind, rows;
    union {
        qs_embed embed;
        qs_position_embed position_embed;
        qs_rms_norm rms_norm;
        qs_layer_norm layer_norm;
        qs_head_norm head_norm;
        qs_cast cast;
        qs_linear linear;
        qs_rope_kv rope_kv;
        qs_attention attention;
        qs_activation activation;
        qs_gather gather;
        qs_soft_cap soft_cap;
        qs_argmax argmax;
        qs_log_softmax log_softmax;
        qs_route route;
        qs_experts experts;
        qs_sigmoid_mul sigmoid_mul;
        qs_lora lora;
        qs_all_gather all_gather;
        qs_head_linear head_linear;
        qs_latent_kv latent_kv;
        qs_latent_attention latent_attention;
        qs_causal_conv causal_conv;
        qs_gated_delta gated_delta;
    };
} qs_op;

/* One step. Sequence s owns the tokens seq_start[s] .. seq_start[s + 1] - 1, at consecutive positions;
 * block_tables i32 [sequences, table_stride] names its KV blocks. slots[t] = block * 16 + offset. adapters i32 [tokens],
 * NULL for none, has the slot of each token's adapter, or -1. state_slots i32 [sequences] has that of each sequence's
 * states, NULL where no operation keeps any; state_saves i32 [tokens], NULL for none, has the slot that gets a copy of
 * the state behind each token, or -1. */
typedef struct {
    const int32_t *token_ids, *positions, *slots, *seq_start, *block_tables, *logit_rows, *adapters, *state_slots,
        *state_saves;
    int32_t tokens, logits, sequences, table_stride;
} qs_step;

/* At load: codes [outputs, inputs] of `bits` bits from the words of a checkpoint to the tiles of a qs_linear of `dtype` u4 or
 * u8 with `k` inputs, of which order i32 [k] (NULL for all in turn) names the code, -1 for a code of 0.
 *
 * The words of output r are strides[r] words apart, the first at words[r], little-endian.
 *   nibbles NULL  the codes of an output follow each other, the first in the lowest bits; at 3, 5 and 6 bits some cross
 *                 the end of a word
 *   else          u8 [outputs], 4 bits alone: a word holds the codes of eight outputs for one input, that of output r in
 *                 its nibble nibbles[r]
 * Rows behind the last output are 0. */
typedef struct {
    const uint32_t *const *words;
    const int32_t *strides;
    const uint8_t *nibbles;
    const int32_t *order;
    void *tiles;
    int32_t outputs, inputs, k, bits, dtype;
} qs_tiling;

/* The tiles first .. first + tiles - 1; callers may split them among threads. Returns 0, -1 for an ISA that this machine
 * lacks, or -2 without memory. */
int32_t qs_tile_codes(const qs_tiling *op, int64_t first, int64_t tiles, int32_t isa);

/* At load: each group of `width` inputs of a weight [rows, inputs] of dtype f32, f16 or bf16 as codes u8
 * round_half_even(w / scale) + 128 in 1 .. 255, and scales f32 [rows, inputs / width], where scale = max |w| / 127, at least
 * 2^-14, rounded to f16 where it is below 65504. */
typedef struct {
    const void *weight;
    uint8_t *codes;
    float *scales;
    int32_t inputs, width, dtype;
} qs_rounding;

/* The rows first .. first + rows - 1; callers may split them among threads. Returns 0, -1 for an ISA that this machine
 * lacks, or -2 without memory. */
int32_t qs_round_rows(const qs_rounding *op, int64_t first, int64_t rows, int32_t isa);

/* Offline: for each row of a weight (a group of inputs) the scale that leaves the least error
 * sum_i importance[i] (w[i] - (code[i] - zero) scale)^2, where every code is the nearest of 0 .. max_code.
 *
 * weight f32 [rows, width], finite; importance f32 [period, width], none negative; row r uses r % period.
 * scales f32 [rows] hold the start, and afterwards the result, a float16 value that is neither zero nor infinite. A
 * result that is not better than the start leaves the start. ranges f32 [steps]: candidates.
 *   zeros NULL   the code of 0 is `zero`, (max_code + 1) / 2. A candidate lays the largest magnitude of the row on that
 *                many codes from there, to either side: scales may be negative.
 *   else         f32 [rows], in and out. A candidate is a share of max(w, 0) - min(w, 0) laid on 0 .. max_code, with the
 *                zero point that belongs to it and the two beside.
 * The scale for a candidate's codes is solved exactly (least squares). max_code is at most 255. */
typedef struct {
    const float *weight, *importance, *ranges;
    float *scales, *zeros;
    int32_t width, period, steps, zero, max_code;
} qs_scale_search;

/* Rows first .. first + rows - 1; callers may split rows among threads. Returns 0, or -1 for an ISA that this machine
 * lacks. */
int32_t qs_search_scales(const qs_scale_search *op, int64_t first, int64_t rows, int32_t isa);

/* Offline: for each row of a weight (a group of inputs) that of its candidates, f32 [rows, steps] and positive, which leaves
 * the least error where every code is the nearest number of four bits (e2m1). The first of equals. Weight, importance,
 * scales (out) and period as of qs_scale_search. */
typedef struct {
    const float *weight, *importance, *candidates;
    float *scales;
    int32_t width, period, steps;
} qs_scale_choice;

/* As qs_search_scales. */
int32_t qs_choose_scales(const qs_scale_choice *op, int64_t first, int64_t rows, int32_t isa);

/* Offline: GPTQ's pass over the inputs of a weight (arXiv 2210.17323) with scales fixed beforehand. Input by input in
 * `order`, every output takes the nearest code of what is left of its weight. The inputs that follow compensate for the
 * error: it is divided by the diagonal of `upper` and applied to them by the row of `upper`. An error is what is lost of
 * what was left; with `aims` it is what is lost of those.
 *
 * weight, aims f32 [outputs, inputs], aims NULL for none; upper f32 [inputs, inputs] in the order of rounding, read only on and above its
 * diagonal; scales, zeros f32 [outputs, inputs / width], zeros NULL where the code of 0 is `zero`; order [inputs],
 * which input comes when; codes [outputs, inputs], 0 .. max_code, at most 255. With `e2m1` codes are numbers of four bits
 * (OCP Microscaling Formats, 2023), half to even, and zero points count for nothing. An output's codes depend only on its
 * own row. */
#define QS_SWEEP_OUTPUTS 32
typedef struct {
    const float *weight, *aims, *upper, *scales, *zeros;
    const int32_t *order;
    uint8_t *codes;
    int32_t inputs, outputs, width, zero, max_code, e2m1;
} qs_sweep;

/* The chunks first .. first + chunks - 1, of QS_SWEEP_OUTPUTS outputs each; callers may split them among threads. Returns
 * 0, -1 for an ISA that this machine lacks, or -2 without memory. */
int32_t qs_sweep_chunks(const qs_sweep *op, int64_t first, int64_t chunks, int32_t isa);

/* Offline: the same for trellis codes (Tseng et al., arXiv 2406.11235), for QS_RING outputs of an input at a time: their
 * symbols are those of the path through the states with the least error, each output's weighted by its squared scale.
 * A path is a ring. The state at its seam is that of the best path around there.
 *
 * weight, aims f32 [outputs, inputs], upper f32 [inputs, inputs], order [inputs] as of qs_sweep; upper NULL: no input
 * makes up for another. scales f32 [outputs, inputs / width]; symbols [panels][inputs][QS_RING], each of `bits` (2, 3
 * or 4) bits. Outputs that the last panel lacks count as 0. */
typedef struct {
    const float *weight, *aims, *upper, *scales;
    const int32_t *order;
    uint8_t *symbols;
    int32_t inputs, outputs, width, bits;
} qs_trellis_sweep;

/* The panels first .. first + panels - 1; callers may split them among threads. Returns 0, -1 for an ISA that this machine
 * lacks, or -2 without memory. */
int32_t qs_trellis_panels(const qs_trellis_sweep *op, int64_t first, int64_t panels, int32_t isa);

/* Offline: the products of calibration, with sums in f32. Inputs are multiplied as f32, or rounded to bf16 where
 * qs_multiplies_bf16; subnormal ones may count as zero. The order of every sum is fixed by the shapes and the ISA.
 * Functions do the pieces first .. first + how many - 1, which callers may split among threads. They return 0, -1 where
 * this machine cannot, or -2 without memory. */
int32_t qs_multiplies_bf16(int32_t isa);

/* Lays the columns of `rows` [count, width], f32 or bf16, `stride` apart, out in panels, the last padded with zeros:
 *   to f32   of 48: f32 [panel][count][48], from f32 alone. `turned`: rows are given as columns [width, count]
 *   to bf16  of 64: bf16 [panel][pair][64][2], a pair being two rows that follow each other (zeros after an odd count)
 * absmax and abssum (f32 [width], or both NULL; not where `turned`) are updated by the magnitudes of each column before
 * rounding: the largest in absmax, their sum added to abssum. A piece is a panel. */
#define QS_F32_PANEL 48
#define QS_BF16_PANEL 64
typedef struct {
    const void *rows;
    void *packed;
    float *absmax, *abssum;
    int64_t stride;
    int32_t count, width, dtype, to, turned;
} qs_pack;
int32_t qs_pack_panels(const qs_pack *op, int64_t first, int64_t panels, int32_t isa);

/* out[i, j] = keep * out[i, j] + gain * sum over rows of left[row, i] * right[row, j]
 *
 * left, right: packed to `dtype`, `count` rows each, of `height` and `width` columns; out f32 [height, width]. A piece is
 * a tile of `out`, panel by panel, row after row. Where `upper` is set (left and right are the same), only tiles that
 * reach the diagonal or lie above it are pieces. */
typedef struct {
    const void *left, *right;
    float *out;
    int32_t height, width, count, dtype, upper;
    float keep, gain;
} qs_moment;
int32_t qs_add_moment(const qs_moment *op, int64_t first, int64_t tiles, int32_t isa);

/* Causal attention within each sequence of a batch: scores in f32, products of `dtype`. queries have `heads`, keys and
 * values `kv_heads`, each f32 (to multiply bf16, or bf16) and `tokens` by `head_dim`, an even number; out `dtype`
 * [batch][tokens][heads][head_dim]. A piece is a key head of a sequence, of batch * kv_heads. */
typedef struct {
    const void *at;
    int64_t batch, head, token; /* strides, in numbers */
    int64_t dtype;
} qs_heads;
typedef struct {
    qs_heads queries, keys, values;
    void *out;
    int32_t heads, kv_heads, tokens, head_dim, dtype;
    float scale;
} qs_causal;
int32_t qs_attend_causal(const qs_causal *op, int64_t first, int64_t items, int32_t isa);

/* out[r, n] = bias[n] + sum over k of x[r * stride + k] * weight[k, n], bias NULL for none; all f32, weight [inputs,
 * outputs] packed, out [rows, outputs]. A row's result depends on no other row. A piece is a chunk of QS_CHUNK rows. */
#define QS_CHUNK 96
typedef struct {
    const float *x, *weight, *bias;
    float *out;
    int64_t stride;
    int32_t rows, inputs, outputs;
} qs_product;
int32_t qs_multiply(const qs_product *op, int64_t first, int64_t chunks, int32_t isa);

/* Draws the token of each row. rows [count]: f32 [vocab] each, without NaN and with something above minus infinity.
 * A token weighs exp((logit - highest) / temperature), where infinite logits count as the largest number. Kept are the
 * top_k likeliest (0 for all); of those the fewest that hold top_p of their mass; of those the ones that weigh min_p or
 * more. point, in [0, 1), picks among them by mass: in order of rank where top_k or top_p is given, else of id. Equal
 * logits rank by id. Weights are f32 (2 ulp), their sums f64. tokens i32 [count]. A piece is a row. */
typedef struct {
    const float *const *rows;
    const double *point, *temperature, *top_p, *min_p;
    const int32_t *top_k;
    int32_t *tokens;
    int32_t vocab;
} qs_row_sampling;
int32_t qs_draw_rows(const qs_row_sampling *op, int64_t first, int64_t rows, int32_t isa);

typedef struct qs_pool qs_pool;

/* A pool of `threads` threads, the caller being one. They spin briefly after work and then sleep. `cpus` [threads] has
 * the CPU of each, or is NULL. The first is for the caller, only while it is in qs_run; afterwards it runs where it ran
 * before. Returns NULL where the threads or memory cannot be had, or a CPU is not available. */
qs_pool *qs_pool_create(int32_t threads, const int32_t *cpus);
void qs_pool_destroy(qs_pool *pool);

/* Bytes of scratch that qs_run needs for these operations on at most max_rows rows. */
int64_t qs_scratch_bytes(const qs_op *ops, int32_t count, int32_t max_rows, int32_t threads);

/* Runs the program. scratch is 64-byte aligned. Returns 0, -1 for an ISA that this machine lacks, -2 without memory, or -3
 * where another rank has ended: then nothing that the program wrote counts. */
int32_t qs_run(const qs_op *ops, int32_t count, const qs_step *step, qs_pool *pool, void *scratch, int32_t isa);

/* Counts one more arrival of this rank, and returns how many those are. What it wrote before is seen by who waits. */
int32_t qs_arrive(const qs_ranks *ranks);

/* Returns 0 when `rank` has arrived `turn` times, or -3 where a rank has ended. It spins briefly and then sleeps. */
int32_t qs_await(const qs_ranks *ranks, int32_t rank, int32_t turn);

/* Arrives, and waits until all ranks have done so as often. Returns as qs_await does. */
int32_t qs_meet(const qs_ranks *ranks);

/* For comparison: products of bytes on one thread, in registers alone. Returns how many, or 0 where this ISA has no
 * instruction whose rate a kernel could reach. */
int64_t qs_peak_products(int64_t loops, int32_t isa);

/* Reads `bytes` of memory, a multiple of 256, in four streams; returns a sum of it. */
int64_t qs_peak_read(const void *memory, int64_t bytes);

/* The best ISA of this machine, and whether it has one. */
int32_t qs_best_isa(void);
int32_t qs_has_isa(int32_t isa);

/* sizeof(qs_op) and sizeof(qs_step), so that the caller can check that its own declarations agree. */
int32_t qs_op_size(void);
int32_t qs_step_size(void);

/* The name of an operation, as in qs_op; NULL behind the last one. */
const char *qs_op_name(int32_t kind);

#endif
