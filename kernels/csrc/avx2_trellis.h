/* Trellis codes with AVX2: 16 states at a time. The text of trellis.h says what is computed. */

/* The codes of 16 states, in 16 bits each. */
INLINE __m256i codes_of_states(__m256i states)
{
    const __m256i one = _mm256_set1_epi8(1), low = _mm256_set1_epi8(15);
    __m256i hash = _mm256_mullo_epi16(states, _mm256_set1_epi16(QS_TRELLIS_FACTOR));
    __m256i nibbles = _mm256_add_epi8(_mm256_and_si256(hash, low), _mm256_and_si256(_mm256_srli_epi16(hash, 4), low));
    return _mm256_maddubs_epi16(nibbles, one);
}

/* Four inputs of a tile of four bits. A word of two bytes has the windows of two lanes. */
INLINE void decode_nibbles(const uint8_t *own, const uint8_t *before, uint8_t *out)
{
    const __m256i window = _mm256_set1_epi16((1 << QS_STATE_BITS) - 1);
    const __m256i places = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)own);
    __m256i last = _mm256_loadu_si256((const __m256i *)(const void *)before);
    __m256i preceding = _mm256_or_si256(_mm256_slli_epi64(bytes, 8), _mm256_srli_epi64(last, 56)), codes[2];
    UNROLL for (int i = 0; i < 2; i++) { /* inputs 0 and 2, 1 and 3 */
        __m256i words = i ? _mm256_unpackhi_epi8(preceding, bytes) : _mm256_unpacklo_epi8(preceding, bytes);
        __m256i even = codes_of_states(_mm256_and_si256(words, window));
        codes[i] = _mm256_or_si256(even, _mm256_slli_epi16(codes_of_states(_mm256_srli_epi16(words, 4)), 8));
    }
    UNROLL for (int i = 0; i < 2; i++) { /* lanes 0 to 7, 8 to 15 */
        __m256i pairs = i ? _mm256_unpackhi_epi8(codes[0], codes[1]) : _mm256_unpacklo_epi8(codes[0], codes[1]);
        pairs = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(pairs, 0xd8), places);
        _mm256_storeu_si256((__m256i *)(void *)(out + 32 * i), pairs);
    }
}

/* The streams of two inputs of a tile of two or three bits, eight bytes each: the last two of the tile before come first.
 * Nothing is read beyond them. */
INLINE __m256i two_streams(const uint8_t *own, const uint8_t *before, __m128i of_own, __m128i of_before, const int bits)
{
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)own);
    __m128i last = _mm_loadl_epi64((const __m128i *)(const void *)(before + (bits == 3 ? 4 : 0)));
    if (bits == 3) {
        int32_t rest;
        memcpy(&rest, own + 8, 4);
        bytes = _mm_insert_epi32(bytes, rest, 2);
    }
    return _mm256_broadcastsi128_si256(_mm_or_si128(_mm_shuffle_epi8(bytes, of_own), _mm_shuffle_epi8(last, of_before)));
}

INLINE void decode_few(const uint8_t *own, const uint8_t *before, int32_t inputs, uint8_t *out, const int bits)
{
    const __m256i beside = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const __m256i window = _mm256_set1_epi32((1 << QS_STATE_BITS) - 1);
    const __m128i of_own = bits == 3 ? _mm_setr_epi8(-1, -1, 0, 1, 2, 3, 4, 5, -1, -1, 6, 7, 8, 9, 10, 11)
                                     : _mm_setr_epi8(-1, -1, 0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6, 7, -1, -1);
    const __m128i of_before = bits == 3 ? _mm_setr_epi8(0, 1, -1, -1, -1, -1, -1, -1, 6, 7, -1, -1, -1, -1, -1, -1)
                                        : _mm_setr_epi8(2, 3, -1, -1, -1, -1, -1, -1, 6, 7, -1, -1, -1, -1, -1, -1);
    __m256i bytes[2][2], shifts[2], codes[2], pairs[2];
    for (int i = 0; i < 2; i++) {
        uint8_t byte[2][32];
        uint32_t shift[8];
        for (int j = 0; j < 8; j++) { /* packing puts four lanes of each vector in turn */
            int first = 16 - QS_STATE_BITS + bits * (1 + 8 * (j / 4) + 4 * i + j % 4);
            shift[j] = first & 7;
            for (int b = 0; b < 8; b++)
                byte[b / 4][4 * j + b % 4] = (uint8_t)(first / 8 + b % 4 < 8 ? first / 8 + b % 4 + b / 4 * 8 : 0x80);
        }
        shifts[i] = _mm256_loadu_si256((const __m256i *)(const void *)shift);
        for (int j = 0; j < 2; j++)
            bytes[j][i] = _mm256_loadu_si256((const __m256i *)(const void *)byte[j]);
    }
    for (int32_t i = 0; i < inputs; i += 4, own += 8 * bits, before += 8 * bits, out += 64) {
        UNROLL for (int pair = 0; pair < 2; pair++) {
            __m256i both = two_streams(own + 4 * bits * pair, before + 4 * bits * pair, of_own, of_before, bits);
            UNROLL for (int j = 0; j < 2; j++) {
                __m256i states[2];
                UNROLL for (int half = 0; half < 2; half++) {
                    states[half] = _mm256_srlv_epi32(_mm256_shuffle_epi8(both, bytes[j][half]), shifts[half]);
                    states[half] = _mm256_and_si256(states[half], window);
                }
                codes[j] = codes_of_states(_mm256_packus_epi32(states[0], states[1]));
            }
            pairs[pair] = _mm256_shuffle_epi8(_mm256_packus_epi16(codes[0], codes[1]), beside);
        }
        __m256i low = _mm256_unpacklo_epi16(pairs[0], pairs[1]), high = _mm256_unpackhi_epi16(pairs[0], pairs[1]);
        _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256((__m256i *)(void *)(out + 32), _mm256_permute2x128_si256(low, high, 0x31));
    }
}

static void decode(const uint8_t *own, const uint8_t *before, int32_t inputs, int32_t bits, uint8_t *out)
{
    switch (bits) {
    case 2:
        decode_few(own, before, inputs, out, 2);
        break;
    case 3:
        decode_few(own, before, inputs, out, 3);
        break;
    case 4:
        for (int32_t i = 0; i < inputs; i += 4)
            decode_nibbles(own + 8 * i, before + 8 * i, out + 16 * i);
        break;
    }
}
