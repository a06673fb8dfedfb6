/* The table of an ISA that computes with vectors, behind all that it names: with its product of integers, the rows that
 * this takes at a time, and what decodes a tile of trellis codes. */
#define VECTOR_KERNELS(INT, ROWS, DECODE)                               \
    {                                                                   \
        .rmsnorm = rmsnorm,                                             \
        .add_rmsnorm = add_rmsnorm,                                     \
        .layernorm = layernorm,                                         \
        .activate = activate,                                           \
        .soft_cap = soft_cap,                                           \
        .log_softmax = log_softmax,                                     \
        .argmax = argmax,                                               \
        .quantize = quantize,                                           \
        .round_input = QS_NAME(round_input),                            \
        .linear_int = INT,                                              \
        .int_rows = ROWS,                                               \
        .linear_float = linear_float,                                   \
        .shrink = shrink,                                               \
        .expand = expand,                                               \
        .rope_kv = rope_kv,                                             \
        .attend = attend,                                               \
        .latent_kv = QS_NAME(latent_kv),                                \
        .attend_latent = attend_latent,                                 \
        .finish_latent = finish_latent,                                 \
        .search_scale = QS_NAME(search_scale),                          \
        .choose_scale = QS_NAME(choose_scale),                          \
        .route = QS_NAME(route),                                        \
        .combine = QS_NAME(combine),                                    \
        .sigmoid_mul = QS_NAME(sigmoid_mul),                            \
        .convolve = convolve,                                           \
        .delta = delta,                                                 \
        .sweep = QS_NAME(sweep),                                        \
        .trellis_bytes = QS_NAME(trellis_bytes),                        \
        .trellis_sweep = QS_NAME(trellis_sweep),                        \
        .decode = DECODE,                                               \
        .draw = QS_NAME(draw),                                          \
    }
