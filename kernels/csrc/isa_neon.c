/* Arm with the dot product of Armv8.2: vectors of 4 floats, and the product of integers by dots of bytes. */
#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <arm_neon.h>

#include "internal.h"

int32_t qs_has_dot_products(void)
{
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has;
#else
    return 0;
#endif
}

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#define QS_NAME(name) qs_neon_##name
#include "portable.h"

#include "neon_vectors.h"
#include "rows.h"
#include "delta_vectors.h"
#include "attention.h"
#include "latent.h"
#include "store_tiles.h"
#include "linear_float.h"
#include "adapter_products.h"

#define ROWS 4 /* rows of a block: 16 accumulators leave 16 registers for codes and inputs */

#include "linear_int.h"

/* 16 codes as signed bytes: one `half` of each byte, or each byte less 128, which the zero point compensates. */
INLINE int8x16_t signed_codes(const uint8_t *w, int part, uint8x16_t book, const int half, const int u4)
{
    uint8x16_t bytes = vld1q_u8(w + 16 * part + (u4 ? 0 : 64 * half));
    if (!u4)
        return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(128)));
    uint8x16_t codes = half ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    return vreinterpretq_s8_u8(u4 >= BOOK ? vqtbl1q_u8(book, codes) : codes);
}

/* sum + the dots of four codes and four inputs, the first or the second. In assembly because clang before version 16
 * declares the intrinsic only if the whole file is compiled for such a processor. */
INLINE int32x4_t dot4(int32x4_t sum, int8x16_t codes, int8x8_t x, const int second)
{
    if (second)
        __asm__("sdot %0.4s, %1.16b, %2.4b[1]" : "+w"(sum) : "w"(codes), "w"(x));
    else
        __asm__("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sum) : "w"(codes), "w"(x));
    return sum;
}

/* Adds the products of an activation group to `dot`. `book`: the numbers for which nibbles stand, where they do. */
INLINE void add_dots(const int_walk *at, int32_t width, uint8x16_t book, int32x4_t dot[ROWS][PARTS], const int rows,
                     const int u4)
{
    const uint8_t *w = at->w;
    for (int32_t j = 0; j < width; j += 8, w += u4 ? 64 : 128) {
        int8x8_t x[ROWS];
        int8x16_t codes[PARTS];
        UNROLL for (int m = 0; m < rows; m++)
            x[m] = vld1_s8(at->x + m * at->x_stride + j);
        UNROLL for (int part = 0; part < PARTS; part++)
            codes[part] = signed_codes(w, part, book, 0, u4);
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int part = 0; part < PARTS; part++)
                dot[m][part] = dot4(dot[m][part], codes[part], x[m], 0);
        UNROLL for (int part = 0; part < PARTS; part++)
            codes[part] = signed_codes(w, part, book, 1, u4);
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int part = 0; part < PARTS; part++)
                dot[m][part] = dot4(dot[m][part], codes[part], x[m], 1);
    }
}

/* One activation group of `rows` rows by one tile. Bytes of numbers of two are less 128, too. */
INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, float sums[ROWS][QS_LANES], const int rows,
                      const int u4)
{
    const uint8x16_t lift = vdupq_n_u8(u4 == BOOK16 ? 128 : 0);
    int32x4_t dot[ROWS][PARTS];
    if (u4 == BOOK16) { /* 256 times the product of high bytes comes first */
        UNROLL for (int i = 0; i < rows * PARTS; i++)
            dot[i / PARTS][i % PARTS] = vdupq_n_s32(0);
        add_dots(at, width, veorq_u8(vld1q_u8(at->codebook + 16), lift), dot, rows, u4);
    }
    UNROLL for (int m = 0; m < rows; m++) {
        int32x4_t start = vdupq_n_s32(at->x_sums[m] * ((u4 == BOOK16 ? 128 * 257 : u4 ? 0 : 128) - zero));
        UNROLL for (int part = 0; part < PARTS; part++)
            dot[m][part] = u4 == BOOK16 ? vaddq_s32(vshlq_n_s32(dot[m][part], 8), start) : start;
    }
    add_dots(at, width, u4 >= BOOK ? veorq_u8(vld1q_u8(at->codebook), lift) : lift, dot, rows, u4);
    UNROLL for (int part = 0; part < PARTS; part++) {
        vf products[ROWS];
        UNROLL for (int m = 0; m < rows; m++)
            products[m] = vcvtq_f32_s32(dot[m][part]);
        add_scaled(at, products, sums[0], QS_LANES, part, rows);
    }
}

#include "vector_kernels.h"

const qs_kernels qs_kernels_neon = VECTOR_KERNELS(linear_int, 12, QS_NAME(decode));
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
