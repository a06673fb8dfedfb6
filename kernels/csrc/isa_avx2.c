/* The portable kernels, vectorized for AVX2. */
#if defined(__x86_64__) || defined(__i386__)
#pragma GCC target("avx2,fma,f16c")
#define QS_NAME(name) qs_avx2_##name
#include "portable.h"

const qs_kernels qs_kernels_avx2 = QS_PORTABLE_KERNELS;
#endif
