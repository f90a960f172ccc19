/* Weights in fewer bytes, for decode_amx.c: made again, to the last bit, just before they are multiplied.

   A decode step waits for memory, so fewer bytes a weight are a faster step.  Models often come from a quantised file:
   32 weights of a row share a scale and an offset and differ in a whole number q.  By the time they are here that is
   forgotten and each is a bfloat16.  But it can be found again:

       weight ~ scale * q + offset     q in 0 .. 15         GGUF's Q4_0, Q4_1     22 bytes for 32 weights instead of 64
       weight ~ scale * q              q in -127 .. 127     Q8_0                  38

   Rounding is the snag, since weights may have been rounded more than once on their way (Q4_1 -> float16 -> bfloat16).
   So a bit is kept for each number.  A bfloat16 is the upper half of a float32: scale * q + offset is computed in
   float32, and the weight is its upper half or the next number away from zero; the bit says which.

   `find4` and `find8` search scale, offset and q of a tile, 32 inputs of 16 outputs, and `equal` compares every weight:
   a matrix in which any can't be had this way stays as it is. */

enum { TILE = 16 * 32 };

struct tile4 {                       /* 352 bytes for 512 weights */
    uint16_t q[4][32];               /* [output / 4][input]: 4 bits for each of four outputs */
    uint32_t next[8];                /* [output / 2]: bit q for the even output, bit 16 + q for the odd one */
    uint16_t scale[16], offset[16];  /* [output], float16 */
};

struct tile8 {                       /* 608 bytes */
    int8_t q[16][32];                /* [output][input] */
    uint32_t next[16];               /* [output]: bit of an input */
    uint16_t scale[16];
};

struct matrix {
    const bf16 *blocks; /* (outputs / 32, inputs / 32, 16 pairs, 32 outputs, 2), as oneDNN has it */
    const void *small;  /* (outputs / 32, inputs / 32, 2) tiles of `bits`: the same weights; null if bits is 16 */
    int64_t bits;
};

static int64_t tile_bytes(int64_t bits) { return bits == 4 ? sizeof(struct tile4) : sizeof(struct tile8); }

/* ---- making them again ---- */

INLINE __m512 half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }

/* 32 bfloat16: the upper halves of even[0], odd[0], even[1], ..., or the numbers after those where `next` says so. */
INLINE __m512i join(__m512 even, __m512 odd, uint32_t next) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16), upper = _mm512_set1_epi32(0xFFFF0000);
    const __m512i both = _mm512_ternarylogic_epi32(upper, _mm512_castps_si512(odd), low, 0xEA); /* (a & b) | c */
    return _mm512_mask_add_epi16(both, next, both, _mm512_set1_epi16(1));
}

/* Two outputs at a time: a table of their 16 numbers each, in which the 32 weights of either are looked up. */
INLINE void expand4(const struct tile4 *t, bf16 out[TILE]) {
    const __m512 even = _mm512_setr_ps(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    const __m512 odd = _mm512_add_ps(even, _mm512_set1_ps(1.0f)), scales = half(t->scale), offsets = half(t->offset);
    const __m512i four_bits = _mm512_set1_epi16(15), upper_table = _mm512_set1_epi16(16);
    for (int i = 0; i < 16; i += 2) {
        const __m512i which = _mm512_inserti64x4(_mm512_set1_epi32(i), _mm256_set1_epi32(i + 1), 1);
        const __m512 scale = _mm512_permutexvar_ps(which, scales), offset = _mm512_permutexvar_ps(which, offsets);
        const __m512i table =
            join(_mm512_fmadd_ps(even, scale, offset), _mm512_fmadd_ps(odd, scale, offset), t->next[i / 2]);
        const __m512i q = _mm512_srli_epi16(_mm512_loadu_si512(t->q[i / 4]), 4 * (i % 4));
        const __m512i first = _mm512_and_si512(q, four_bits);
        const __m512i second = _mm512_ternarylogic_epi32(four_bits, _mm512_srli_epi16(q, 4), upper_table, 0xEA);
        _mm512_store_si512(out + 32 * i, _mm512_permutexvar_epi16(first, table));
        _mm512_store_si512(out + 32 * (i + 1), _mm512_permutexvar_epi16(second, table));
    }
}

INLINE void expand8(const struct tile8 *t, bf16 out[TILE]) {
    float scale[16] __attribute__((aligned(64)));
    _mm512_store_ps(scale, _mm512_mul_ps(half(t->scale), _mm512_set1_ps(0x1p-16f))); /* q is used as q * 2^16 */
    for (int i = 0; i < 16; i++) {
        const __m512i q = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)t->q[i]));
        const __m512 even = _mm512_cvtepi32_ps(_mm512_slli_epi32(q, 16));
        const __m512 odd = _mm512_cvtepi32_ps(_mm512_and_si512(q, _mm512_set1_epi32(0xFFFF0000)));
        const __m512 by = _mm512_set1_ps(scale[i]);
        _mm512_store_si512(out + 32 * i, join(_mm512_mul_ps(even, by), _mm512_mul_ps(odd, by), t->next[i]));
    }
}

/* ---- finding them ---- */

/* The 32 weights of each of 16 outputs, an output to a lane, from the left or right half of one of oneDNN's blocks. */
INLINE void read_tile(const bf16 *block, __m512 w[32]) {
    for (int i = 0; i < 16; i++) {
        const __m512i pair = _mm512_loadu_si512(block + 64 * i);
        w[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
        w[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xFFFF0000)));
    }
}

INLINE __m512i beyond(__m512 weight, __m512 x) { /* from x's upper half to the weight: has to be 0 or 0x10000 */
    const __m512i upper = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0xFFFF0000));
    return _mm512_sub_epi32(_mm512_castps_si512(weight), upper);
}

/* For which of the outputs `among` scale and offset give all weights. */
static __mmask16 fits(const __m512 w[32], const __m512 q[32], __m512 scale, __m512 offset, __mmask16 among) {
    const __m512i others = _mm512_set1_epi32(~0x10000);
    for (int k = 0; k < 32 && among; k++)
        among = _mm512_mask_testn_epi32_mask(among, beyond(w[k], _mm512_fmadd_ps(q[k], scale, offset)), others);
    return among;
}

/* The i-th of the float16 numbers around x: x, the next, the one before, the next but one, ... */
INLINE __m256i around(__m512 x, int i) {
    const __m256i at = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_add_epi16(at, _mm256_set1_epi16(i & 1 ? (i + 1) / 2 : -(i / 2)));
}

/* The smallest weight has q = 0 and the largest 15: that is how quantising chooses the scale.  So the scale is nearly
   known, and q with it; then the weight nearest to zero, which has the finest rounding, gives the offset. */
static int find4(const bf16 *block, struct tile4 *t) {
    __m512 w[32], q[32];
    read_tile(block, w);
    __m512 least = w[0], most = w[0], nearest = w[0], its_q = _mm512_setzero_ps();
    for (int k = 1; k < 32; k++) least = _mm512_min_ps(least, w[k]), most = _mm512_max_ps(most, w[k]);
    const __m512 range = _mm512_sub_ps(most, least);
    const __mmask16 differ = _mm512_cmp_ps_mask(range, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 per = _mm512_maskz_div_ps(differ, _mm512_set1_ps(15.0f), range);
    for (int k = 0; k < 32; k++) {
        q[k] = _mm512_roundscale_ps(_mm512_mul_ps(_mm512_sub_ps(w[k], least), per), 0);
        const __mmask16 nearer = _mm512_cmp_ps_mask(_mm512_abs_ps(w[k]), _mm512_abs_ps(nearest), _CMP_LE_OQ);
        nearest = _mm512_mask_mov_ps(nearest, nearer, w[k]), its_q = _mm512_mask_mov_ps(its_q, nearer, q[k]);
    }
    __mmask16 left = 0xFFFF;
    for (int i = 0; i < 33 && left; i++) {
        const __m256i scale = around(_mm512_mul_ps(range, _mm512_set1_ps(1.0f / 15)), i);
        const __m512 about = _mm512_fnmadd_ps(its_q, _mm512_cvtph_ps(scale), nearest);
        for (int j = 0; j < 5 && left; j++) {
            const __m256i offset = around(about, j);
            const __mmask16 found = fits(w, q, _mm512_cvtph_ps(scale), _mm512_cvtph_ps(offset), left);
            _mm256_mask_storeu_epi16(t->scale, found, scale), _mm256_mask_storeu_epi16(t->offset, found, offset);
            left &= ~found;
        }
    }
    if (left) return 0;
    memset(t->q, 0, sizeof t->q), memset(t->next, 0, sizeof t->next);
    for (int k = 0; k < 32; k++) {
        int32_t number[16], more[16];
        _mm512_storeu_si512(number, _mm512_cvtps_epi32(q[k]));
        _mm512_storeu_si512(more, beyond(w[k], _mm512_fmadd_ps(q[k], half(t->scale), half(t->offset))));
        for (int c = 0; c < 16; c++) {
            t->q[c / 4][k] |= number[c] << 4 * (c % 4);
            t->next[c / 2] |= (uint32_t)(more[c] != 0) << (16 * (c % 2) + number[c]);
        }
    }
    return 1;
}

INLINE void divide(const __m512 w[32], __m512 scale, __m512 q[32]) {
    const __mmask16 some = _mm512_cmp_ps_mask(scale, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 most = _mm512_set1_ps(127.0f), least = _mm512_set1_ps(-127.0f);
    for (int k = 0; k < 32; k++) {
        const __m512 x = _mm512_roundscale_ps(_mm512_maskz_div_ps(some, w[k], scale), 0);
        q[k] = _mm512_max_ps(_mm512_min_ps(x, most), least);
    }
}

/* The largest magnitude has q = 127 or -127. */
static int find8(const bf16 *block, struct tile8 *t) {
    __m512 w[32], q[32], most = _mm512_setzero_ps();
    read_tile(block, w);
    for (int k = 0; k < 32; k++) most = _mm512_max_ps(most, _mm512_abs_ps(w[k]));
    __mmask16 left = 0xFFFF;
    for (int i = 0; i < 33 && left; i++) {
        const __m256i scale = around(_mm512_mul_ps(most, _mm512_set1_ps(1.0f / 127)), i);
        divide(w, _mm512_cvtph_ps(scale), q);
        const __mmask16 found = fits(w, q, _mm512_cvtph_ps(scale), _mm512_setzero_ps(), left);
        _mm256_mask_storeu_epi16(t->scale, found, scale);
        left &= ~found;
    }
    if (left) return 0;
    memset(t->next, 0, sizeof t->next);
    divide(w, half(t->scale), q);
    for (int k = 0; k < 32; k++) {
        int32_t number[16], more[16];
        _mm512_storeu_si512(number, _mm512_cvtps_epi32(q[k]));
        _mm512_storeu_si512(more, beyond(w[k], _mm512_mul_ps(q[k], half(t->scale))));
        for (int c = 0; c < 16; c++) t->q[c][k] = number[c], t->next[c] |= (uint32_t)(more[c] != 0) << k;
    }
    return 1;
}

/* Whether the tile gives the weights; not if two with the same q differ in their last bit, say. */
static int equal(const bf16 *block, const void *small, int64_t bits) {
    bf16 made[TILE] __attribute__((aligned(64)));
    if (bits == 4) expand4(small, made);
    else expand8(small, made);
    int same = 1;
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 32; k++) same &= made[32 * i + k] == block[64 * (k / 2) + 2 * i + k % 2];
    return same;
}
