/* The products of calibration: one table for each kind of processor. Not part of the contract. */
#ifndef QS_PRODUCTS_H
#define QS_PRODUCTS_H

#include "internal.h"

typedef struct {
    void (*pack)(const qs_pack *op, int32_t first, int32_t panels);
    void (*add_tiles)(const qs_moment *op, int32_t i, int32_t j, int32_t end); /* [j, end) of a row of tiles */
    int32_t (*attend)(const qs_causal *op, int64_t first, int64_t items);
    void (*multiply)(const qs_product *op, int32_t first, int32_t rows);
} qs_products;

extern const qs_products qs_products_portable;
#ifdef QS_X86
extern const qs_products qs_products_avx2, qs_products_avx512;
#if defined(__clang__) || __GNUC__ >= 10
#define QS_BF16_PRODUCTS 1
extern const qs_products qs_products_bf16; /* no `multiply`: that of the others is as fast */
#ifdef QS_AMX_TILES
extern const qs_products qs_products_tiles; /* the same numbers, packed alike */
#endif
#endif
#endif

#endif
