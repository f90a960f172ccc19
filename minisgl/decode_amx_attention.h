/* Attention over the paged pool, for decode_amx.c: one new token (`attend`) or 16 of a prompt (`attend_block`). */

/* ---- one token: bound by reading K and V ---- */

/* The totals of 16 vectors, side by side; each is added up as _mm512_reduce_add_ps does it. */
INLINE __m512 totals(const __m512 x[16]) {
    __m512 four[4]; /* x's at 4 numbers each, the i-th, (4 + i)-th, ... */
    for (int i = 0; i < 4; i++) {
        const __m512 a = _mm512_add_ps(
            _mm512_shuffle_f32x4(x[i], x[4 + i], 0x44), _mm512_shuffle_f32x4(x[i], x[4 + i], 0xEE));
        const __m512 b = _mm512_add_ps(
            _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0x44), _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0xEE));
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
    __m512 two[2];
    for (int i = 0; i < 2; i++) {
        const __m512d a = _mm512_castps_pd(four[2 * i]), b = _mm512_castps_pd(four[2 * i + 1]);
        two[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    return _mm512_add_ps(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xDD));
}

/* `count` query heads of one sequence over the keys first .. length - 1 of their KV head, found through `slots`.
   q, out: (count, dim).  keys, values: of slot 0; `stride` numbers from one slot to the next.  Count and dim are
   constants where this is called, so that the accumulators stay in registers. */
INLINE void attend(
    const int count, const int dim, const bf16 *q, const bf16 *keys, const bf16 *values, int64_t stride,
    const int32_t *slots, int64_t first, int64_t length, float scale, float *scores, int64_t scores_width, bf16 *out
) {
    __m512bh query[4][4];
    __m512 largest[4];
    for (int h = 0; h < count; h++) {
        largest[h] = _mm512_set1_ps(-INFINITY);
        for (int i = 0; i < dim / 32; i++) query[h][i] = (__m512bh)_mm512_loadu_si512(q + h * dim + 32 * i);
    }
    const int64_t seen = length - first;
    for (int64_t j = 0; j < seen; j += 16) { /* past the last key: any key, but a score for which e^x is 0 */
        const __mmask16 real = seen - j < 16 ? (1 << (seen - j)) - 1 : 0xFFFF;
        const bf16 *key[16];
        for (int t = 0; t < 16; t++) {
            key[t] = keys + slots[first + (j + t < seen ? j + t : j)] * stride;
            if (j + t < seen) fetch(values + slots[first + j + t] * stride, dim);
            if (j + 16 + t < seen) fetch(keys + slots[first + j + 16 + t] * stride, dim);
        }
        for (int h = 0; h < count; h++) {
            __m512 sum[16];
            for (int t = 0; t < 16; t++) {
                sum[t] = _mm512_setzero_ps();
                for (int i = 0; i < dim / 32; i++)
                    sum[t] = _mm512_dpbf16_ps(sum[t], query[h][i], (__m512bh)_mm512_loadu_si512(key[t] + 32 * i));
            }
            const __m512 score = _mm512_mask_mul_ps(_mm512_set1_ps(-1e30f), real, totals(sum), _mm512_set1_ps(scale));
            _mm512_storeu_ps(scores + h * scores_width + j, score);
            largest[h] = _mm512_max_ps(score, largest[h]);
        }
    }
    float total[4];
    for (int h = 0; h < count; h++) {
        float *p = scores + h * scores_width;
        const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest[h]));
        __m512 sum = _mm512_setzero_ps();
        for (int64_t j = 0; j < seen; j += 16) {
            const __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(p + j), most));
            _mm512_storeu_ps(p + j, e);
            sum = _mm512_add_ps(sum, e);
        }
        total[h] = _mm512_reduce_add_ps(sum);
    }
    __m512 mix[4][8];
    for (int h = 0; h < count; h++)
        for (int i = 0; i < dim / 16; i++) mix[h][i] = _mm512_setzero_ps();
    for (int64_t j = 0; j < seen; j++) {
        const bf16 *value = values + slots[first + j] * stride;
        for (int i = 0; i < dim / 16; i++) {
            const __m512 v = load(value + 16 * i);
            for (int h = 0; h < count; h++)
                mix[h][i] = _mm512_fmadd_ps(_mm512_set1_ps(scores[h * scores_width + j]), v, mix[h][i]);
        }
    }
    for (int h = 0; h < count; h++)
        for (int i = 0; i < dim / 16; i++)
            store(out + h * dim + 16 * i, _mm512_div_ps(mix[h][i], _mm512_set1_ps(total[h])));
}

#define FOR_COUNT(dim) \
    switch (count) { \
    case 1: attend(1, dim, q, keys, values, stride, slots, first, length, scale, scores, width, out); break; \
    case 2: attend(2, dim, q, keys, values, stride, slots, first, length, scale, scores, width, out); break; \
    case 3: attend(3, dim, q, keys, values, stride, slots, first, length, scale, scores, width, out); break; \
    default: attend(4, dim, q, keys, values, stride, slots, first, length, scale, scores, width, out); \
    }

static void attend_group(
    int64_t group, int64_t dim, const bf16 *q, const bf16 *keys, const bf16 *values, int64_t stride,
    const int32_t *slots, int64_t first, int64_t length, float *scores, int64_t width, bf16 *out
) {
    const float scale = 1.0f / sqrtf(dim);
    for (int64_t done = 0; done < group; done += 4, q += 4 * dim, out += 4 * dim) {
        const int64_t count = group - done;
        switch (dim) {
        case 32: FOR_COUNT(32) break;
        case 64: FOR_COUNT(64) break;
        case 96: FOR_COUNT(96) break;
        default: FOR_COUNT(128)
        }
    }
}

/* ---- 16 tokens: bound by computing ---- */

enum { MOST_HEADS = 3 }; /* at once: their sums are six of the eight tiles */

/* `heads` query heads of `count` tokens of a sequence, up to 16, over the heads' KV head; the i-th token sees `seen` +
   i keys, less what is before its window.  Tokens are lanes while scores are computed (keys * queries^T), then rows:

       scores (32 keys, 16 tokens) -> e^x, as pairs of keys (16, 16 tokens) -> transposed: tile (16 tokens, 32 keys)
       out (16 tokens, 16 of dim)  +=  that tile  *  values as pairs of keys (16, 16 of dim)

   Keys are taken in blocks of 32 from position 0: what a token gets does not depend on which others are in its call.
   q, out: (count, .., dim), q_stride and out_stride from token to token.  work: 16 float32 for each head and key, keys
   rounded up to whole blocks. */
INLINE void attend_block(
    const int dim, int heads, int64_t count, const bf16 *q, int64_t q_stride, const bf16 *keys, const bf16 *values,
    int64_t stride, const int32_t *slots, int64_t seen, int64_t window, float *work, bf16 *out, int64_t out_stride
) {
    const int64_t begin = window && seen > window ? (seen - window) / 32 * 32 : 0, end = seen + count - 1;
    const int64_t size = 16 * (up(end, 32) - begin); /* of a head's work */
    bf16 tile[4][TILE] __attribute__((aligned(64))), queries[MOST_HEADS][4][TILE] __attribute__((aligned(64)));
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < dim / 32; i++) {
            __m512i r[16];
            for (int t = 0; t < 16; t++)
                r[t] = _mm512_loadu_si512(q + (t < count ? t : 0) * q_stride + h * dim + 32 * i);
            transpose(r);
            for (int t = 0; t < 16; t++) _mm512_store_si512(queries[h][i] + 32 * t, r[t]);
        }

    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i last = _mm512_add_epi32(_mm512_set1_epi32(seen - 1), lane);
    const __m512i first = window ? _mm512_sub_epi32(last, _mm512_set1_epi32(window - 1)) : _mm512_setzero_si512();
    __m512 largest[MOST_HEADS];
    for (int h = 0; h < heads; h++) largest[h] = _mm512_set1_ps(-INFINITY);
    for (int64_t j = begin; j < up(end, 32); j += 16) {
        const int all = j + 16 <= seen && (!window || j > seen + 15 - window); /* tokens see all of these keys */
        for (int t = 0; t < 16; t++) {
            const int64_t slot = slots[j + t < end ? j + t : 0]; /* past the end: any, it will be hidden */
            for (int i = 0; i < dim / 32; i++)
                _mm512_store_si512(tile[i] + 32 * t, _mm512_loadu_si512(keys + slot * stride + 32 * i));
        }
        for (int h = 0; h < heads; h++) {
            float *scores = work + h * size + 16 * (j - begin);
            _tile_zero(0);
            for (int i = 0; i < dim / 32; i++) {
                _tile_loadd(6, tile[i], 64); _tile_loadd(7, queries[h][i], 64);
                _tile_dpbf16ps(0, 6, 7);
            }
            _tile_stored(0, scores, 64);
            for (int t = 0; t < 16; t++) {
                __m512 score = _mm512_loadu_ps(scores + 16 * t);
                if (!all) {
                    const __m512i key = _mm512_set1_epi32(j + t);
                    const __mmask16 hidden = _mm512_cmplt_epi32_mask(key, first) | _mm512_cmpgt_epi32_mask(key, last);
                    score = _mm512_mask_mov_ps(score, j + t < end ? hidden : 0xFFFF, _mm512_set1_ps(-1e30f));
                    _mm512_storeu_ps(scores + 16 * t, score);
                }
                largest[h] = _mm512_max_ps(score, largest[h]);
            }
        }
    }

    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(dim));
    float totals[MOST_HEADS][16];
    for (int h = 0; h < heads; h++) {
        __m512 total = _mm512_setzero_ps();
        const __m512 most = _mm512_mul_ps(largest[h], scale);
        for (float *scores = work + h * size; scores < work + (h + 1) * size; scores += 32 * 16) {
            __m512i r[16];
            for (int t = 0; t < 16; t++) {
                const __m512 a = exponential(_mm512_fmsub_ps(_mm512_loadu_ps(scores + 32 * t), scale, most));
                const __m512 b = exponential(_mm512_fmsub_ps(_mm512_loadu_ps(scores + 32 * t + 16), scale, most));
                total = _mm512_add_ps(_mm512_add_ps(total, a), b);
                r[t] = in_pairs(a, b);
            }
            transpose(r); /* the tile takes the place of its scores */
            for (int t = 0; t < 16; t++) _mm512_storeu_si512(scores + 16 * t, r[t]);
        }
        _mm512_storeu_ps(totals[h], total);
    }

    float sums[2 * MOST_HEADS][16][16] __attribute__((aligned(64)));
    for (int64_t c = 0; c < dim; c += 32) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
        for (int64_t j = begin; j < end; j += 32) {
            for (int t = 0; t < 16; t++) {
                const bf16 *a = values + slots[j + 2 * t < end ? j + 2 * t : 0] * stride + c;
                const bf16 *b = values + slots[j + 2 * t + 1 < end ? j + 2 * t + 1 : 0] * stride + c;
                const __m512i low = _mm512_loadu_si512(a), high = _mm512_loadu_si512(b);
                _mm512_store_si512(tile[0] + 32 * t, pairs_of(low, high, 0));
                _mm512_store_si512(tile[1] + 32 * t, pairs_of(low, high, 16));
            }
            const float *at = work + 16 * (j - begin);
#define HEAD(h, left, right) \
            if (h < heads) { \
                _tile_loadd(6, at + h * size, 64); \
                _tile_loadd(7, tile[0], 64); _tile_dpbf16ps(left, 6, 7); \
                _tile_loadd(7, tile[1], 64); _tile_dpbf16ps(right, 6, 7); \
            }
            HEAD(0, 0, 1) HEAD(1, 2, 3) HEAD(2, 4, 5)
        }
        _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
        _tile_stored(4, sums[4], 64); _tile_stored(5, sums[5], 64);
        for (int h = 0; h < heads; h++)
            for (int t = 0; t < count; t++)
                for (int i = 0; i < 2; i++) {
                    const __m512 x = _mm512_div_ps(_mm512_load_ps(sums[2 * h + i][t]), _mm512_set1_ps(totals[h][t]));
                    store(out + t * out_stride + h * dim + c + 16 * i, x);
                }
    }
}

static void attend_prompt(
    int64_t group, int64_t dim, int64_t count, const bf16 *q, int64_t q_stride, const bf16 *keys, const bf16 *values,
    int64_t stride, const int32_t *slots, int64_t seen, int64_t window, float *work, bf16 *out, int64_t out_stride
) {
#define FOR_DIM(n) \
    case n: \
        attend_block(n, heads, count, q, q_stride, keys, values, stride, slots, seen, window, work, out, out_stride); \
        break;
    for (int64_t h = 0; h < group; h += MOST_HEADS, q += MOST_HEADS * dim, out += MOST_HEADS * dim) {
        const int heads = group - h < MOST_HEADS ? group - h : MOST_HEADS;
        switch (dim) { FOR_DIM(32) FOR_DIM(64) FOR_DIM(96) FOR_DIM(128) }
    }
}
