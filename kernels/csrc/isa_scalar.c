/* The portable kernels, compiled for the baseline ISA: every machine can run them. */
#define QS_NAME(name) qs_scalar_##name
#include "portable.h"

const qs_kernels qs_kernels_scalar = QS_PORTABLE_KERNELS;
