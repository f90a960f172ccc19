/* Attention over the paged pool, for decode_amx.c: of one new token or of several of one sequence. */

enum { MOST_LANES = 48, KEYS = 32 }; /* at once: their sums are six of the eight tiles; keys in a block */

/* New tokens of one sequence, up to 16, and what they need of it. */
struct piece {
    int64_t first, count, seen; /* token; tokens; how many keys the first of them sees, the next one more, ... */
    const int32_t *slots;       /* of the sequence's keys */
};

/* Some query heads of a piece's tokens, those over one KV head: (token, head) is lane token * group + head, which is
   where its q and its output are: q + token * q_stride + head * dim. */
struct queries {
    int64_t group, seen, window; /* heads; as in `piece`; tokens or 0 */
    const bf16 *q;
    bf16 *out;
    int64_t q_stride, out_stride;
};

struct keys { /* of slot 0 of a layer's KV head, `stride` numbers from one slot to the next */
    const bf16 *keys, *values;
    int64_t stride;
    const int32_t *slots;
};

/* Up to 48 lanes, `from` the first.  Lanes are columns while scores are computed (keys * queries^T), then rows:

       scores (32 keys, 16 lanes) -> e^x, as pairs of keys (16, 16 lanes) -> transposed: tile (16 lanes, 32 keys)
       out (16 lanes, 16 of dim)  +=  that tile  *  values as pairs of keys (16, 16 of dim)

   A token alone has few lanes, but its keys cost the same for a few as for 16: tokens that a grammar forced, which
   follow each other, come nearly free.  Keys are taken in blocks of 32 from position 0, and what a lane must not see
   counts as exactly 0: its result does not depend on which other lanes are in its call.
   work: 16 float32 for each key, rounded up to whole blocks, and 16 lanes. */
INLINE void attend_lanes(
    const int dim, const struct queries *p, int64_t from, int64_t lanes, const struct keys *kv, float *work
) {
    const int64_t tiles = up(lanes, 16) / 16, seen = p->seen + from / p->group, window = p->window;
    const int64_t begin = window && seen > window ? (seen - window) / KEYS * KEYS : 0;
    const int64_t end = p->seen + (from + lanes - 1) / p->group, size = 16 * (up(end, KEYS) - begin);
    bf16 tile[2][4][TILE] __attribute__((aligned(64))), queries[3][4][TILE] __attribute__((aligned(64)));
    __m512i first[3], last[3]; /* key that a lane sees */
    __m512 largest[3];
    bf16 *out[MOST_LANES];
    int64_t token = from / p->group, head = from % p->group;
    for (int h = 0; h < tiles; h++) {
        int32_t last_key[16];
        const bf16 *q[16];
        for (int t = 0; t < 16; t++) { /* past the last lane: that one again */
            q[t] = p->q + token * p->q_stride + head * dim, out[16 * h + t] = p->out + token * p->out_stride + head * dim;
            last_key[t] = p->seen + token - 1;
            if (16 * h + t < lanes - 1 && ++head == p->group) head = 0, token++;
        }
        last[h] = _mm512_loadu_si512(last_key);
        first[h] = window ? _mm512_sub_epi32(last[h], _mm512_set1_epi32(window - 1)) : _mm512_setzero_si512();
        largest[h] = _mm512_set1_ps(-INFINITY);
        for (int i = 0; i < dim / 32; i++) {
            __m512i r[16];
            for (int t = 0; t < 16; t++) r[t] = _mm512_loadu_si512(q[t] + 32 * i);
            transpose(r);
            for (int t = 0; t < 16; t++) _mm512_store_si512(queries[h][i] + 32 * t, r[t]);
        }
    }

    for (int64_t j = begin; j < end; j += KEYS) {
        const int all = j + KEYS <= seen && (!window || j >= end - window); /* every lane sees all of these keys */
        for (int t = 0; t < KEYS; t++) {
            const int64_t slot = kv->slots[j + t < end ? j + t : begin]; /* past the end: any, it will be hidden */
            for (int i = 0; i < dim / 32; i++)
                _mm512_store_si512(
                    tile[t / 16][i] + 32 * (t % 16), _mm512_loadu_si512(kv->keys + slot * kv->stride + 32 * i));
            fetch(kv->values + slot * kv->stride, dim);
            if (j + KEYS + t < end) fetch(kv->keys + kv->slots[j + KEYS + t] * kv->stride, dim);
        }
        for (int h = 0; h < tiles; h++) {
            float *scores = work + h * size + 16 * (j - begin);
            _tile_zero(0); _tile_zero(1);
            for (int i = 0; i < dim / 32; i++) {
                _tile_loadd(5, tile[0][i], 64); _tile_loadd(6, tile[1][i], 64); _tile_loadd(7, queries[h][i], 64);
                _tile_dpbf16ps(0, 5, 7); _tile_dpbf16ps(1, 6, 7);
            }
            _tile_stored(0, scores, 64); _tile_stored(1, scores + 16 * 16, 64);
            for (int t = 0; t < KEYS; t++) {
                __m512 score = _mm512_loadu_ps(scores + 16 * t);
                if (!all) {
                    const __m512i key = _mm512_set1_epi32(j + t);
                    const __mmask16 hidden =
                        _mm512_cmplt_epi32_mask(key, first[h]) | _mm512_cmpgt_epi32_mask(key, last[h]);
                    score = _mm512_mask_mov_ps(score, hidden, _mm512_set1_ps(-1e30f));
                    _mm512_storeu_ps(scores + 16 * t, score);
                }
                largest[h] = _mm512_max_ps(score, largest[h]);
            }
        }
    }

    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(dim));
    float totals[3][16];
    for (int h = 0; h < tiles; h++) {
        __m512 total = _mm512_setzero_ps();
        const __m512 most = _mm512_mul_ps(largest[h], scale);
        for (float *scores = work + h * size; scores < work + (h + 1) * size; scores += KEYS * 16) {
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

    float sums[6][16][16] __attribute__((aligned(64)));
    for (int64_t c = 0; c < dim; c += 32) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
        for (int64_t j = begin; j < end; j += KEYS) {
            for (int t = 0; t < 16; t++) {
                const bf16 *a = kv->values + kv->slots[j + 2 * t < end ? j + 2 * t : begin] * kv->stride + c;
                const bf16 *b = kv->values + kv->slots[j + 2 * t + 1 < end ? j + 2 * t + 1 : begin] * kv->stride + c;
                const __m512i low = _mm512_loadu_si512(a), high = _mm512_loadu_si512(b);
                _mm512_store_si512(tile[0][0] + 32 * t, pairs_of(low, high, 0));
                _mm512_store_si512(tile[1][0] + 32 * t, pairs_of(low, high, 16));
            }
            const float *at = work + 16 * (j - begin);
#define LANES(h, left, right) \
            if (h < tiles) { \
                _tile_loadd(6, at + h * size, 64); \
                _tile_loadd(7, tile[0][0], 64); _tile_dpbf16ps(left, 6, 7); \
                _tile_loadd(7, tile[1][0], 64); _tile_dpbf16ps(right, 6, 7); \
            }
            LANES(0, 0, 1) LANES(1, 2, 3) LANES(2, 4, 5)
        }
        _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
        if (tiles > 1) { _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64); }
        if (tiles > 2) { _tile_stored(4, sums[4], 64); _tile_stored(5, sums[5], 64); }
        for (int64_t l = 0; l < lanes; l++) {
            const int64_t h = l / 16, t = l % 16;
            for (int i = 0; i < 2; i++) {
                const __m512 x = _mm512_div_ps(_mm512_load_ps(sums[2 * h + i][t]), _mm512_set1_ps(totals[h][t]));
                store(out[l] + c + 16 * i, x);
            }
        }
    }
}

static void attend(int64_t dim, const struct queries *p, int64_t count, const struct keys *kv, float *work) {
#define FOR_DIM(n) case n: attend_lanes(n, p, from, lanes, kv, work); break;
    for (int64_t from = 0; from < count * p->group; from += MOST_LANES) {
        const int64_t left = count * p->group - from, lanes = left < MOST_LANES ? left : MOST_LANES;
        switch (dim) { FOR_DIM(32) FOR_DIM(64) FOR_DIM(96) FOR_DIM(128) }
    }
}
