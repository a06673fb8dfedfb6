/* The products of calibration: which kernels each processor uses, and how the work is split. */
#include "products.h"

int32_t qs_multiplies_bf16(int32_t isa)
{
#ifdef QS_BF16_PRODUCTS
    __builtin_cpu_init();
    return (isa == QS_AVX512 || isa == QS_AMX) && qs_has_isa(isa) && __builtin_cpu_supports("avx512bf16");
#else
    (void)isa;
    return 0;
#endif
}

static const qs_products *products_of(int32_t isa, int32_t dtype)
{
#ifdef QS_BF16_PRODUCTS
#ifdef QS_AMX_TILES
    if (dtype == QS_BF16 && isa == QS_AMX)
        return qs_multiplies_bf16(isa) ? &qs_products_tiles : NULL;
#endif
    if (dtype == QS_BF16)
        return qs_multiplies_bf16(isa) ? &qs_products_bf16 : NULL;
#endif
    if (dtype != QS_F32 || !qs_has_isa(isa))
        return NULL;
#ifdef QS_X86
    if (isa == QS_AVX2 || isa == QS_AVXVNNI)
        return &qs_products_avx2;
    if (isa == QS_AVX512 || isa == QS_AMX)
        return &qs_products_avx512;
#endif
    return &qs_products_portable;
}

int32_t qs_pack_panels(const qs_pack *op, int64_t first, int64_t panels, int32_t isa)
{
    const qs_products *products = products_of(isa, op->to);
    if (products)
        products->pack(op, (int32_t)first, (int32_t)panels);
    return products ? 0 : -1;
}

int32_t qs_add_moment(const qs_moment *op, int64_t first, int64_t tiles, int32_t isa)
{
    const qs_products *products = products_of(isa, op->dtype);
    int64_t at = 0;
    int32_t panel = op->dtype == QS_BF16 ? QS_BF16_PANEL : QS_F32_PANEL;
    int32_t rows = (op->height + panel - 1) / panel, columns = (op->width + panel - 1) / panel;
    for (int32_t i = 0; products && i < rows; i++) {
        const int32_t start = op->upper ? i : 0, all = columns - start;
        const int64_t from = first > at ? first - at : 0, end = first + tiles - at < all ? first + tiles - at : all;
        if (from < end)
            products->add_tiles(op, i, start + (int32_t)from, start + (int32_t)end);
        at += all;
    }
    return products ? 0 : -1;
}

int32_t qs_attend_causal(const qs_causal *op, int64_t first, int64_t items, int32_t isa)
{
    const qs_products *products = products_of(isa, op->dtype);
    return products ? products->attend(op, first, items) : -1;
}

int32_t qs_multiply(const qs_product *op, int64_t first, int64_t chunks, int32_t isa)
{
    const qs_products *products = products_of(isa, QS_F32);
    for (int64_t row = first * QS_CHUNK; products && row < (first + chunks) * QS_CHUNK && row < op->rows; row += QS_CHUNK)
        products->multiply(op, (int32_t)row, op->rows - row < QS_CHUNK ? (int32_t)(op->rows - row) : QS_CHUNK);
    return products ? 0 : -1;
}
