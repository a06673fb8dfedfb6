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
    return vreinterpretq_s8_u8(u4 == BOOK ? vqtbl1q_u8(book, codes) : codes);
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

/* One activation group of `rows` rows by one tile. The sum starts at -zero * sum(codes), so that the zero point costs
 * nothing inside. */
INLINE void int_group(const int_walk *at, int32_t zero, int32_t width, float sums[ROWS][QS_LANES], const int rows,
                      const int u4)
{
    const uint8_t *w = at->w;
    const uint8x16_t book = u4 == BOOK ? vld1q_u8(at->codebook) : vdupq_n_u8(0);
    int32x4_t dot[ROWS][PARTS];
    UNROLL for (int part = 0; part < PARTS; part++) {
        int32x4_t zeros = at->zeros ? vld1q_s32(at->zeros + 4 * part) : vdupq_n_s32(zero);
        int32x4_t lift = vsubq_s32(vdupq_n_s32(u4 ? 0 : 128), zeros);
        UNROLL for (int m = 0; m < rows; m++)
            dot[m][part] = vmulq_n_s32(lift, at->x_sums[m * at->groups]);
    }
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
    UNROLL for (int part = 0; part < PARTS; part++) {
        vf scale = at->scales ? load(at->scales + 4 * part) : load_halves(at->halves + 4 * part);
        UNROLL for (int m = 0; m < rows; m++) {
            vf product = vcvtq_f32_s32(dot[m][part]) * scale;
            store(sums[m] + 4 * part, fused(product, all(at->x_scales[m * at->groups]), load(sums[m] + 4 * part)));
        }
    }
}

const qs_kernels qs_kernels_neon = {
    .rmsnorm = rmsnorm,
    .add_rmsnorm = add_rmsnorm,
    .layernorm = layernorm,
    .activate = activate,
    .soft_cap = soft_cap,
    .log_softmax = log_softmax,
    .argmax = argmax,
    .quantize = quantize,
    .round_input = QS_NAME(round_input),
    .linear_int = linear_int,
    .linear_float = linear_float,
    .shrink = shrink,
    .expand = expand,
    .rope_kv = rope_kv,
    .attend = attend,
    .latent_kv = QS_NAME(latent_kv),
    .attend_latent = attend_latent,
    .finish_latent = finish_latent,
    .search_scale = QS_NAME(search_scale),
    .route = QS_NAME(route),
    .combine = QS_NAME(combine),
    .sigmoid_mul = QS_NAME(sigmoid_mul),
    .convolve = convolve,
    .delta = delta,
    .sweep = QS_NAME(sweep),
    .draw = QS_NAME(draw),
};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
