/* What the machine does at most, to compare kernels with: products in registers, and memory read in a stream. */
#include <stdint.h>

#include "qserve.h"

#if defined(__x86_64__) || defined(__i386__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")
#include <immintrin.h>

/* Six sums, more than an instruction takes cycles, of products of 64 bytes each; none of it touches memory. */
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
#pragma GCC pop_options
#else
static int64_t multiply(int64_t loops)
{
    (void)loops;
    return 0;
}
#endif

int64_t qs_peak_products(int64_t loops, int32_t isa)
{
    return isa == QS_AVX512 && qs_best_isa() == QS_AVX512 ? multiply(loops) : 0;
}

int64_t qs_peak_read(const void *memory, int64_t bytes)
{
    const int64_t *words = memory;
    int64_t sum = 0;
    for (int64_t i = 0; i < bytes / 8; i += 32) { /* 256 bytes: four lines, fetched 2 KB ahead */
        for (int line = 0; line < 4; line++)
            __builtin_prefetch((const char *)(words + i) + 2048 + 64 * line, 0, 2);
        for (int j = 0; j < 32; j++)
            sum += words[i + j];
    }
    return sum;
}
