/* From a checkpoint to what kernels read: packed codes to the tiles of qs_linear, and dense weights to int8. Bound by
 * memory, so plain C that a compiler makes vectors of is enough for every processor. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define STRIP 16 /* words of an output that are read in a row */

typedef uint32_t word_of_lanes[QS_LANES];

static int32_t words_of(const qs_tiling *op)
{
    return (int32_t)(((int64_t)op->inputs * op->bits + 31) / 32);
}

/* The words of each lane, the first code in the lowest bits; zeros behind the last output. */
static void gather(const qs_tiling *op, int64_t first, word_of_lanes *block)
{
    const uint32_t *const *from = op->words + first;
    const int32_t *stride = op->strides + first, count = words_of(op);
    const int32_t lanes = op->outputs - first < QS_LANES ? (int32_t)(op->outputs - first) : QS_LANES;
    int beside = lanes == QS_LANES;
    for (int l = 1; l < lanes; l++)
        beside &= from[l] == from[0] + l && stride[l] == stride[0];
    if (beside) {
        for (int32_t w = 0; w < count; w++)
            memcpy(block[w], from[0] + (int64_t)w * stride[0], sizeof *block);
        return;
    }
    memset(block, 0, sizeof *block * (size_t)count);
    for (int32_t strip = 0; strip < count; strip += STRIP)
        for (int l = 0; l < lanes; l++)
            for (int32_t w = strip; w < count && w < strip + STRIP; w++)
                block[w][l] = from[l][(int64_t)w * stride[l]];
}

/* Eight words of eight nibbles: nibble i of word j and nibble j of word i change places. */
static void turn(uint32_t *words)
{
    uint32_t mask = 0x0000ffff;
    for (int apart = 4; apart; apart >>= 1, mask ^= mask << 4 * apart)
        for (int i = 0; i < 8; i = (i + apart + 1) & ~apart) {
            uint32_t moved = (words[i] >> 4 * apart ^ words[i + apart]) & mask;
            words[i] ^= moved << 4 * apart;
            words[i + apart] ^= moved;
        }
}

/* The same where a word holds a nibble of each of eight outputs, and the next input is `stride` words further. */
static void gather_turned(const qs_tiling *op, int64_t first, word_of_lanes *block)
{
    const int32_t lanes = op->outputs - first < QS_LANES ? (int32_t)(op->outputs - first) : QS_LANES;
    const int32_t count = words_of(op);
    memset(block, 0, sizeof *block * (size_t)count);
    for (int32_t w = 0; w < count; w++) {
        const uint32_t *turned_from = NULL;
        uint32_t turned[8];
        for (int l = 0; l < lanes; l++) {
            const uint32_t *from = op->words[first + l] + (int64_t)w * 8 * op->strides[first + l];
            for (int i = 0; i < 8 && from != turned_from; i++)
                turned[i] = w * 8 + i < op->inputs ? from[(int64_t)i * op->strides[first + l]] : 0;
            if (from != turned_from)
                turn(turned);
            turned_from = from;
            block[w][l] = turned[op->nibbles[first + l]];
        }
    }
}

/* Words of eight nibbles in order: nibble i and nibble 4 + i become a byte. */
static void pair_nibbles(const qs_tiling *op, const word_of_lanes *block, word_of_lanes *out)
{
    for (int32_t j = 0; j < op->k / 8; j++)
        for (int l = 0; l < QS_LANES; l++) {
            uint32_t word = block[j][l], moved = (word ^ word >> 8) & 0x0000ff00;
            word ^= moved ^ moved << 8;
            moved = (word ^ word >> 4) & 0x00f000f0;
            out[j][l] = word ^ moved ^ moved << 4;
        }
}

/* Any order and any number of bits. */
static void place_codes(const qs_tiling *op, const word_of_lanes *block, word_of_lanes *out)
{
    const int32_t codes = op->dtype == QS_U4 ? 8 : 4;
    const uint32_t mask = (1u << op->bits) - 1;
    for (int32_t j = 0; j < op->k / codes; j++) {
        word_of_lanes sum = {0};
        for (int32_t i = 0; i < codes; i++) {
            const int32_t code = op->order ? op->order[j * codes + i] : j * codes + i, at = i < 4 ? 8 * i : 8 * i - 28;
            if (code < 0)
                continue;
            const int64_t bit = (int64_t)code * op->bits;
            const uint32_t *low = block[bit / 32], *high = block[bit / 32 + 1];
            const int32_t shift = bit % 32;
            if (shift + op->bits > 32)
                for (int l = 0; l < QS_LANES; l++)
                    sum[l] |= ((low[l] >> shift | high[l] << (32 - shift)) & mask) << at;
            else
                for (int l = 0; l < QS_LANES; l++)
                    sum[l] |= (low[l] >> shift & mask) << at;
        }
        memcpy(out[j], sum, sizeof sum);
    }
}

int32_t qs_tile_codes(const qs_tiling *op, int64_t first, int64_t tiles, int32_t isa)
{
    const int32_t count = op->k / (op->dtype == QS_U4 ? 8 : 4);
    word_of_lanes *block = malloc(sizeof *block * ((size_t)words_of(op) + 1)); /* one more, which a shift may read */
    if (!qs_has_isa(isa))
        return free(block), -1;
    if (!block)
        return -2;
    for (int64_t tile = first; tile < first + tiles; tile++) {
        word_of_lanes *out = (word_of_lanes *)op->tiles + tile * count;
        (op->nibbles ? gather_turned : gather)(op, tile * QS_LANES, block);
        if (op->bits == 4 && op->dtype == QS_U4 && !op->order)
            pair_nibbles(op, block, out);
        else if (op->bits == 8 && op->dtype == QS_U8 && !op->order)
            memcpy(out, block, sizeof *out * (size_t)count);
        else
            place_codes(op, block, out);
    }
    free(block);
    return 0;
}

static void as_floats(const void *from, int64_t first, int32_t count, int32_t dtype, float *out)
{
    const uint16_t *halves = (const uint16_t *)from + first;
    if (dtype == QS_F32)
        memcpy(out, (const float *)from + first, sizeof *out * (size_t)count);
    else if (dtype == QS_BF16)
        for (int32_t i = 0; i < count; i++)
            out[i] = qs_bf16_to_float(halves[i]);
    else
        for (int32_t i = 0; i < count; i++)
            out[i] = qs_half_to_float(halves[i]);
}

/* The largest magnitude, NaN where a value is: without the sign, bits are in the order of what they stand for, and those
 * of NaN are above all. Integers are compared in vectors by every compiler. */
static float largest(const float *values, int32_t count)
{
    int32_t most = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float found;
    memcpy(&found, &most, sizeof found);
    return found;
}

int32_t qs_round_rows(const qs_rounding *op, int64_t first, int64_t rows, int32_t isa)
{
    const int32_t groups = op->inputs / op->width;
    float *values = malloc(sizeof *values * (size_t)op->width);
    if (!qs_has_isa(isa))
        return free(values), -1;
    if (!values)
        return -2;
    for (int64_t group = first * groups; group < (first + rows) * groups; group++) {
        uint8_t *codes = op->codes + group * op->width;
        as_floats(op->weight, group * op->width, op->width, op->dtype, values);
        float scale = largest(values, op->width) / 127.0f;
        scale = scale < 1.0f / (1 << 14) ? 1.0f / (1 << 14) : scale;
        scale = scale < 65504.0f ? qs_half_to_float(qs_float_to_half(scale)) : scale;
        op->scales[group] = scale;
        for (int32_t i = 0; i < op->width; i++) {
            float steps = values[i] / scale;
            steps = steps > 127.0f ? 127.0f : steps;
            steps = steps > -127.0f ? steps : -127.0f; /* of NaN, too */
            codes[i] = (uint8_t)((int32_t)(steps + 12582912.0f - 12582912.0f) + 128);
        }
    }
    free(values);
    return 0;
}
