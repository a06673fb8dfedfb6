/* The vectors that rows.h asks for, of 4 floats. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 4
#define PARTS (QS_LANES / LANES)
#define FLOAT_TILES 1 /* 24 accumulators, four weights and an input: 29 of 32 registers */
#define CHAINS 2 /* of an adapter, see adapter_products.h: 16 accumulators */
#define SHRINK_ROWS 2
#define EXPAND_ROWS 4 /* 16 */
#define EXPAND_TILES 1
#define ATTEND_ROWS(X) X(6) X(4) X(3) X(2) X(1)

typedef float32x4_t vf;
typedef int32x4_t vi;

INLINE vf load(const float *x)
{
    return vld1q_f32(x);
}

INLINE void store(float *out, vf x)
{
    vst1q_f32(out, x);
}

INLINE void stream(float *out, vf x)
{
    vst1q_f32(out, x);
}

INLINE void end_streams(void)
{
}

INLINE vf all(float x)
{
    return vdupq_n_f32(x);
}

INLINE vf fused(vf a, vf b, vf c)
{
    return vfmaq_f32(c, a, b);
}

INLINE vf higher(vf a, vf b)
{
    return vmaxq_f32(a, b);
}

INLINE vf lower(vf a, vf b)
{
    return vminq_f32(a, b);
}

INLINE vf nearest(vf x)
{
    return vrndnq_f32(x);
}

INLINE vf times_power(vf x, vf n)
{
    int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return x * vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
}

INLINE vf unless_below(vf x, vf y, vf low)
{
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(y, low)));
}

INLINE vf nan_where(vf x, vf y, vf value)
{
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(x), vceqq_f32(y, value))); /* all bits set */
}

INLINE uint32x4_t lane_bits(void)
{
    const uint32_t bits[LANES] = {1, 2, 4, 8};
    return vld1q_u32(bits);
}

INLINE uint32_t above(vf a, vf b)
{
    return vaddvq_u32(vandq_u32(vcgtq_f32(a, b), lane_bits()));
}

INLINE uint32_t equal(vf a, vf b)
{
    return vaddvq_u32(vandq_u32(vceqq_f32(a, b), lane_bits()));
}

INLINE vf chosen(uint32_t bits, vf a, vf b)
{
    return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), lane_bits()), a, b);
}

INLINE float highest(vf x)
{
    return vmaxvq_f32(x);
}

INLINE float sum(vf x)
{
    return vaddvq_f32(x);
}

INLINE vi magnitudes(vi top, vf x)
{
    return vmaxq_s32(top, vandq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(0x7fffffff)));
}

INLINE uint32_t highest_bits(vi x)
{
    return (uint32_t)vmaxvq_s32(x);
}

INLINE vi codes_of(vf x)
{
    return vcvtnq_s32_f32(x);
}

INLINE void store_codes(int8_t *out, vi codes)
{
    int16x4_t words = vqmovn_s32(codes);
    uint32_t four = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
    memcpy(out, &four, sizeof four);
}

INLINE int32_t sum_codes(vi x)
{
    return vaddvq_s32(x);
}

INLINE vf load_halves(const uint16_t *x)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
}

/* e4m3 without sign, a 256th of it: that is the f16 of these bits, if they are moved. */
INLINE vf load_f8(const uint8_t *x)
{
    uint32_t four;
    memcpy(&four, x, sizeof four);
    uint16x4_t bits = vget_low_u16(vshll_n_u8(vreinterpret_u8_u32(vdup_n_u32(four)), 7));
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

INLINE void store_halves(uint16_t *out, vf x)
{
    vst1_u16(out, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

INLINE vf load_bf16(const uint16_t *x)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16));
}

INLINE int16x4_t four_bytes(const void *x)
{
    uint32_t four;
    memcpy(&four, x, sizeof four);
    return vget_low_s16(vmovl_s8(vcreate_s8(four)));
}

INLINE vi load_unsigned(const uint8_t *x)
{
    uint32_t four;
    memcpy(&four, x, sizeof four);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}

INLINE vf floats_of(vi x)
{
    return vcvtq_f32_s32(x);
}

INLINE vf load_bytes(const int8_t *x)
{
    return vcvtq_f32_s32(vmovl_s16(four_bytes(x)));
}

/* Their bits, moved to where float16 has them; bits 15 and 14 are both the sign, and one is removed. */
INLINE vf load_e4m3(const uint8_t *x)
{
    int16x4_t moved = vand_s16(vshl_n_s16(four_bytes(x), 7), vdup_n_s16((int16_t)0xbfff));
    return vcvt_f32_f16(vreinterpret_f16_s16(moved));
}
