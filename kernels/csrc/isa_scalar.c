/* The portable kernels as the compiler's baseline builds them: every machine has these. */
#define QS_NAME(name) qs_scalar_##name
#include "portable.h"

const qs_kernels qs_kernels_scalar = QS_PORTABLE_KERNELS;
