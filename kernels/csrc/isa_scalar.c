/* The portable kernels as the compiler's baseline builds them: every machine has these. */
#define QS_NAME(name) qs_scalar_##name
#include "portable.h"

const qs_kernels qs_kernels_scalar = {
    .rmsnorm = qs_scalar_rmsnorm,
    .silu_mul = qs_scalar_silu_mul,
    .log_softmax = qs_scalar_log_softmax,
    .argmax = qs_scalar_argmax,
    .quantize = qs_scalar_quantize,
    .linear_int = qs_scalar_linear_int,
    .linear_float = qs_scalar_linear_float,
    .rope_kv = qs_scalar_rope_kv,
    .attend = qs_scalar_attend,
};

