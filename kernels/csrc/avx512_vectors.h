/* The vectors that rows.h asks for, of 16 floats. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 16
#define PARTS (QS_LANES / LANES)
#define FLOAT_TILES 4 /* 24 accumulators leave 8 registers */
#define CHAINS 4 /* of an adapter, see adapter_products.h: 16 accumulators */
#define SHRINK_ROWS 4
#define EXPAND_ROWS 6 /* 24 */
#define EXPAND_TILES 4
#define ATTEND_ROWS(X) X(12) X(6) X(4) X(3) X(2) X(1)

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

INLINE vf load(const float *x)
{
    return _mm512_loadu_ps(x);
}

INLINE void store(float *out, vf x)
{
    _mm512_storeu_ps(out, x);
}

INLINE void stream(float *out, vf x)
{
    _mm512_stream_ps(out, x);
}

INLINE void end_streams(void)
{
    _mm_sfence();
}

INLINE vf all(float x)
{
    return _mm512_set1_ps(x);
}

INLINE vf fused(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

INLINE vf higher(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

INLINE vf lower(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

INLINE vf nearest(vf x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vf times_power(vf x, vf n)
{
    return _mm512_scalef_ps(x, n);
}

INLINE vf unless_below(vf x, vf y, vf low)
{
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(y, low, _CMP_LT_OQ), _mm512_setzero_ps());
}

INLINE vf nan_where(vf x, vf y, vf value)
{
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(y, value, _CMP_EQ_OQ), _mm512_set1_ps(NAN));
}

INLINE uint32_t above(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}

INLINE uint32_t equal(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}

INLINE vf chosen(uint32_t bits, vf a, vf b)
{
    return _mm512_mask_mov_ps(b, (__mmask16)bits, a);
}

INLINE float highest(vf x)
{
    return _mm512_reduce_max_ps(x);
}

INLINE float sum(vf x)
{
    return _mm512_reduce_add_ps(x);
}

INLINE vi magnitudes(vi top, vf x)
{
    __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return (vi)_mm512_max_epi32((__m512i)top, size);
}

INLINE uint32_t highest_bits(vi x)
{
    return (uint32_t)_mm512_reduce_max_epi32((__m512i)x);
}

INLINE vi codes_of(vf x)
{
    return (vi)_mm512_cvtps_epi32(x);
}

INLINE void store_codes(int8_t *out, vi codes)
{
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)codes));
}

INLINE int32_t sum_codes(vi x)
{
    return _mm512_reduce_add_epi32((__m512i)x);
}

INLINE vf load_halves(const uint16_t *x)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

/* e4m3 without sign, a 256th of it: that is the f16 of these bits, if they are moved. */
INLINE vf load_f8(const uint8_t *x)
{
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)x)), 7));
}

INLINE void store_halves(uint16_t *out, vf x)
{
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vf load_bf16(const uint16_t *x)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE vi load_unsigned(const uint8_t *x)
{
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
}

INLINE vf floats_of(vi x)
{
    return _mm512_cvtepi32_ps((__m512i)x);
}

INLINE vf load_bytes(const int8_t *x)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}

/* Their bits, moved to where float16 has them; bits 15 and 14 are both the sign, and one is removed. */
INLINE vf load_e4m3(const uint8_t *x)
{
    __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)x)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16((int16_t)0xbfff)));
}
