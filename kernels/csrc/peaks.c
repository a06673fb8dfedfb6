/* The peak rates of the machine, to compare kernels with: products in registers, and memory read in streams. */
#include <stdint.h>

#include "internal.h"

/* Four streams, as many as a product reads. */
#define READ_STREAMS(name)                                            \
    static int64_t name(const int64_t *words, int64_t part)           \
    {                                                                 \
        int64_t sums[32] = {0}, sum = 0;                              \
        for (int64_t i = 0; i < part; i += 8)                         \
            for (int stream = 0; stream < 4; stream++)                \
                for (int j = 0; j < 8; j++)                           \
                    sums[8 * stream + j] += words[stream * part + i + j]; \
        for (int j = 0; j < 32; j++)                                  \
            sum += sums[j];                                           \
        return sum;                                                   \
    }

READ_STREAMS(read_streams)

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni,prefer-vector-width=512")
#endif

READ_STREAMS(read_wide)

/* Products of 64 bytes into six sums, more than the cycles of an instruction; none of it touches memory. */
static int64_t multiply(int64_t loops)
{
    __m512i w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(1), a = w, b = w, c = w, d = w, e = w, f = w;
    for (int64_t n = 0; n < loops; n++)
        for (int half = 0; half < 2; half++)
            __asm__ volatile("vpdpbusd %7, %6, %0\n\tvpdpbusd %7, %6, %1\n\tvpdpbusd %7, %6, %2\n\t"
                             "vpdpbusd %7, %6, %3\n\tvpdpbusd %7, %6, %4\n\tvpdpbusd %7, %6, %5"
                             : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f)
                             : "v"(w), "v"(x));
    return loops * 12 * 64;
}
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* Products of 32 nibbles and 32 bytes into eight independent 16-bit sums, so that none waits. */
__attribute__((target("avx2"))) static int64_t multiply_pairs(int64_t loops)
{
#define PAIRS(sum) "vpmaddubsw %10, %9, %8\n\tvpaddw %8, %" #sum ", %" #sum "\n\t"
    __m256i w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(1), a = w, b = w, c = w, d = w, e = w, f = w, g = w, h = w, product;
    for (int64_t n = 0; n < loops; n++)
        __asm__ volatile(PAIRS(0) PAIRS(1) PAIRS(2) PAIRS(3) PAIRS(4) PAIRS(5) PAIRS(6) PAIRS(7)
                         : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f), "+x"(g), "+x"(h), "=&x"(product)
                         : "x"(w), "x"(x));
#undef PAIRS
    return loops * 8 * 32;
}
#else
#define read_wide read_streams
#endif

int64_t qs_peak_products(int64_t loops, int32_t isa)
{
    if (!qs_has_isa(isa))
        return 0;
#ifdef QS_AMX_TILES
    if (isa == QS_AMX)
        return qs_amx_multiply(loops);
#endif
#ifdef QS_X86
    return isa == QS_AVX512 ? multiply(loops) : isa == QS_AVX2 ? multiply_pairs(loops) : 0;
#else
    return 0;
#endif
}

int64_t qs_peak_read(const void *memory, int64_t bytes)
{
    return (qs_has_isa(QS_AVX512) ? read_wide : read_streams)(memory, bytes / 256 * 8);
}
