/* isa_avxvnni.c as processors with AVX-512 encode it, where it can be tested. */
#define QS_EVEX
#include "isa_avxvnni.c"
