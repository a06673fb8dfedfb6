/* The kernels that this machine has, and those of them that are called outside of a program. */
#include <stdatomic.h>
#include <stdlib.h>

#include "internal.h"
#ifdef QS_X86
#include <cpuid.h>
#endif
#ifdef QS_AMX_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef QS_X86
/* Asked once: in a virtual machine the instruction takes microseconds, and every step asks for its kernels. */
static int has_avx_vnni(void)
{
    static atomic_int known = -1;
    unsigned a = 0, b, c, d;
    if (atomic_load_explicit(&known, memory_order_relaxed) < 0)
        atomic_store(&known, __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1));
    return atomic_load_explicit(&known, memory_order_relaxed);
}

#ifdef QS_AMX_TILES
#define TILE_DATA 18            /* the state of tiles, of which the system keeps that of each thread */
#define REQUEST_STATE 0x1023    /* ARCH_REQ_XCOMP_PERM */

/* Whether the processor has tiles of bytes and of bfloat16, and the system lets this process use them. */
static int has_amx(void)
{
    static atomic_int known = -1;
    unsigned a, b, c, d = 0;
    if (atomic_load_explicit(&known, memory_order_relaxed) < 0) {
        const int tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
        atomic_store(&known, tiles && syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0);
    }
    return atomic_load_explicit(&known, memory_order_relaxed);
}
#endif

const qs_kernels *qs_kernels_of(int32_t isa)
{
    __builtin_cpu_init();
    /* f16c is older than avx2; whether the system keeps the wide registers is asked for avx2, and so for avx-vnni */
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int vnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
    const int avx512 = vnni && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    switch (isa) {
    case QS_SCALAR:
        return &qs_kernels_scalar;
    case QS_AVX2:
        return avx2 ? &qs_kernels_avx2 : NULL;
    case QS_AVX512:
        return avx512 ? &qs_kernels_avx512 : NULL;
#ifdef QS_VNNI
    case QS_AVXVNNI:
        return avx2 && has_avx_vnni() ? &qs_kernels_vex : avx2 && vnni ? &qs_kernels_evex : NULL;
#endif
#ifdef QS_AMX_TILES
    case QS_AMX:
        return avx512 && has_amx() ? &qs_kernels_amx : NULL;
#endif
    }
    return NULL;
}
#else
const qs_kernels *qs_kernels_of(int32_t isa)
{
#ifdef QS_ARM
    if (isa == QS_NEON && qs_has_dot_products())
        return &qs_kernels_neon;
#endif
    return isa == QS_SCALAR ? &qs_kernels_scalar : NULL;
}
#endif

int32_t qs_best_isa(void)
{
    static const int32_t best_first[] = {QS_AMX, QS_AVX512, QS_AVXVNNI, QS_AVX2, QS_NEON};
    for (size_t i = 0; i < sizeof best_first / sizeof *best_first; i++)
        if (qs_kernels_of(best_first[i]))
            return best_first[i];
    return QS_SCALAR;
}

int32_t qs_has_isa(int32_t isa)
{
    return qs_kernels_of(isa) != NULL;
}

int32_t qs_search_scales(const qs_scale_search *op, int64_t first, int64_t rows, int32_t isa)
{
    const qs_kernels *kernels = qs_kernels_of(isa);
    for (int64_t row = first; kernels && row < first + rows; row++)
        kernels->search_scale(op, row);
    return kernels ? 0 : -1;
}

int32_t qs_choose_scales(const qs_scale_choice *op, int64_t first, int64_t rows, int32_t isa)
{
    const qs_kernels *kernels = qs_kernels_of(isa);
    for (int64_t row = first; kernels && row < first + rows; row++)
        kernels->choose_scale(op, row);
    return kernels ? 0 : -1;
}

int32_t qs_draw_rows(const qs_row_sampling *op, int64_t first, int64_t rows, int32_t isa)
{
    const qs_kernels *kernels = qs_kernels_of(isa);
    for (int64_t row = first; kernels && row < first + rows; row++)
        if ((op->tokens[row] = kernels->draw(op, row)) < 0)
            return -2;
    return kernels ? 0 : -1;
}

int32_t qs_sweep_chunks(const qs_sweep *op, int64_t first, int64_t chunks, int32_t isa)
{
    const qs_kernels *kernels = qs_kernels_of(isa);
    if (!kernels)
        return -1;
    float *errors = malloc(sizeof(float) * QS_SWEEP_OUTPUTS * (size_t)op->inputs);
    if (!errors)
        return -2;
    for (int64_t chunk = first; chunk < first + chunks; chunk++)
        kernels->sweep(op, chunk, errors);
    free(errors);
    return 0;
}

int32_t qs_trellis_panels(const qs_trellis_sweep *op, int64_t first, int64_t panels, int32_t isa)
{
    const qs_kernels *kernels = qs_kernels_of(isa);
    if (!kernels)
        return -1;
    void *memory = malloc((size_t)kernels->trellis_bytes(op));
    if (!memory)
        return -2;
    for (int64_t panel = first; panel < first + panels; panel++)
        kernels->trellis_sweep(op, panel, memory);
    free(memory);
    return 0;
}
