/* The portable kernels, compiled for the baseline ISA: every machine can run them. */
#define QS_NAME(name) qs_scalar_##name
#include "portable.h"

/* Vectors of one number, for what is written over vectors alone. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 1
#define PARTS QS_LANES
typedef float vf;

INLINE vf load(const float *x)
{
    return *x;
}

INLINE void store(float *out, vf x)
{
    *out = x;
}

INLINE vf all(float x)
{
    return x;
}

INLINE vf fused(vf a, vf b, vf c)
{
    return a * b + c;
}

INLINE vf higher(vf a, vf b)
{
    return a > b ? a : b;
}

INLINE uint32_t above(vf a, vf b)
{
    return a > b;
}

INLINE vf chosen(uint32_t bits, vf a, vf b)
{
    return bits & 1 ? a : b;
}

INLINE vf exp_lanes(vf x)
{
    return qs_scalar_exp(x);
}

INLINE vf load_floats(const void *values, int64_t at, const int dtype)
{
    return qs_scalar_cached(values, at, dtype);
}

#define CHAINS 1
#define SHRINK_ROWS 1
#define EXPAND_ROWS 1
#define EXPAND_TILES 1

#include "latent.h"
#include "adapter_products.h"

const qs_kernels qs_kernels_scalar = {
    .rmsnorm = qs_scalar_rmsnorm,
    .add_rmsnorm = qs_scalar_add_rmsnorm,
    .layernorm = qs_scalar_layernorm,
    .activate = qs_scalar_activate,
    .soft_cap = qs_scalar_soft_cap,
    .log_softmax = qs_scalar_log_softmax,
    .argmax = qs_scalar_argmax,
    .quantize = qs_scalar_quantize,
    .round_input = qs_scalar_round_input,
    .linear_int = qs_scalar_linear_int,
    .int_rows = 12,
    .linear_float = qs_scalar_linear_float,
    .shrink = shrink,
    .expand = expand,
    .rope_kv = qs_scalar_rope_kv,
    .attend = qs_scalar_attend,
    .latent_kv = qs_scalar_latent_kv,
    .attend_latent = attend_latent,
    .finish_latent = finish_latent,
    .search_scale = qs_scalar_search_scale,
    .choose_scale = qs_scalar_choose_scale,
    .route = qs_scalar_route,
    .combine = qs_scalar_combine,
    .sigmoid_mul = qs_scalar_sigmoid_mul,
    .sweep = qs_scalar_sweep,
    .trellis_bytes = qs_scalar_trellis_bytes,
    .trellis_sweep = qs_scalar_trellis_sweep,
    .decode = qs_scalar_decode,
    .draw = qs_scalar_draw,
    .convolve = qs_scalar_convolve,
    .delta = qs_scalar_delta,
};
