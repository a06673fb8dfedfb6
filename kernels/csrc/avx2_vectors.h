/* The vectors that rows.h asks for, of 8 floats. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 8
#define PARTS (QS_LANES / LANES)
#define FLOAT_TILES 1 /* 12 accumulators, two weights and an input: 15 of 16 registers */
#define CHAINS 2 /* of an adapter, see adapter_products.h: 8 accumulators */
#define SHRINK_ROWS 2
#define EXPAND_ROWS 6 /* 12 */
#define EXPAND_TILES 1
#define ATTEND_ROWS(X) X(6) X(4) X(3) X(2) X(1)

typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));

INLINE vf load(const float *x)
{
    return _mm256_loadu_ps(x);
}

INLINE void store(float *out, vf x)
{
    _mm256_storeu_ps(out, x);
}

INLINE void stream(float *out, vf x)
{
    _mm256_stream_ps(out, x);
}

INLINE void end_streams(void)
{
    _mm_sfence();
}

INLINE vf all(float x)
{
    return _mm256_set1_ps(x);
}

INLINE vf fused(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE vf higher(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

INLINE vf lower(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}

INLINE vf nearest(vf x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vf times_power(vf x, vf n)
{
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

INLINE vf unless_below(vf x, vf y, vf low)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(y, low, _CMP_LT_OQ), x);
}

INLINE vf nan_where(vf x, vf y, vf value)
{
    return _mm256_or_ps(x, _mm256_cmp_ps(y, value, _CMP_EQ_OQ)); /* all bits set */
}

INLINE uint32_t above(vf a, vf b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
}

INLINE uint32_t equal(vf a, vf b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}

INLINE vf chosen(uint32_t bits, vf a, vf b)
{
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32((int32_t)bits), lanes);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
}

INLINE float highest(vf x)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

INLINE float sum(vf x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

INLINE vi magnitudes(vi top, vf x)
{
    __m256i size = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
    return (vi)_mm256_max_epi32((__m256i)top, size);
}

INLINE uint32_t highest_bits(vi x)
{
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 1)));
}

INLINE vi codes_of(vf x)
{
    return (vi)_mm256_cvtps_epi32(x);
}

INLINE void store_codes(int8_t *out, vi codes)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)codes), _mm256_extracti128_si256((__m256i)codes, 1));
    _mm_storel_epi64((__m128i *)out, _mm_packs_epi16(words, words));
}

INLINE int32_t sum_codes(vi x)
{
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
}

#define HAS_REACH 1

INLINE vi size_of(vi codes)
{
    return (vi)_mm256_abs_epi32((__m256i)codes);
}

/* The reach of codes whose sums, and whose sizes' sums, are in these lanes. */
INLINE int32_t reach_of(vi total, vi size)
{
    __m256i sides = _mm256_hadd_epi32((__m256i)(size + total), (__m256i)(size - total)); /* twice */
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sides), _mm256_extracti128_si256(sides, 1));
    four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 1))) / 2;
}

INLINE vf load_halves(const uint16_t *x)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}

/* e4m3 without sign, a 256th of it: that is the f16 of these bits, if they are moved. */
INLINE vf load_f8(const uint8_t *x)
{
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)x)), 7));
}

INLINE void store_halves(uint16_t *out, vf x)
{
    _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vf load_bf16(const uint16_t *x)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

INLINE vi load_unsigned(const uint8_t *x)
{
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)x));
}

INLINE vf floats_of(vi x)
{
    return _mm256_cvtepi32_ps((__m256i)x);
}

INLINE vf load_bytes(const int8_t *x)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
}

/* Their bits, moved to where float16 has them; bits 15 and 14 are both the sign, and one is removed. */
INLINE vf load_e4m3(const uint8_t *x)
{
    __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)x)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16((int16_t)0xbfff)));
}

/* The 16 numbers of a codebook in each half, where a shuffle of bytes finds them. */
INLINE __m256i both(const uint8_t *codebook)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codebook));
}
