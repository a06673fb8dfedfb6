/* isa_avxvnni.c in the encoding of processors with AVX-512, on which it can be tested. */
#define QS_EVEX
#include "isa_avxvnni.c"
