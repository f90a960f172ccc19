/* Matrix products on AMX's tiles, for decode_amx.c. */

enum {
    ROWS = 32, COLUMNS = 32, /* of a result, computed together */
    GROUP = 256,             /* rows that meet a block of weights while both are in the L2 cache */
    MOST = 1 << 19,          /* numbers of x with small weights: x has to stay in the L2 cache beside them */
    AHEAD = 8192,            /* bytes of weights, asked for before they are used */
};

/* Whether the kernel lets this process use AMX (Linux asks to be asked: Documentation/arch/x86/xstate.rst). */
int allowed(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0; }

struct tiles {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

/* All eight tiles at full size.  oneDNN, which also runs on these threads, may count on its own configuration. */
INLINE void use_tiles(struct tiles *before) {
    struct tiles now = {.palette = 1};
    for (int i = 0; i < 8; i++) now.bytes_per_row[i] = 64, now.rows[i] = 16;
    memset(before, 0, sizeof *before);
    /* GCC's header says that 8 of the 64 bytes are read or written: make it store, and forget, all of them */
    __asm__ volatile("" : : "r"(&now), "r"(before) : "memory");
    _tile_storeconfig(before);
    _tile_loadconfig(&now);
}

INLINE void restore_tiles(const struct tiles *before) {
    if (before->palette) _tile_loadconfig(before);
    else _tile_release();
}

/* Small weights, made: pairs of tiles, (k / 32, 2, 16 outputs, 32 inputs).  If only one block of rows meets them, two
   pairs take turns, which stay in the L1 cache; if several do, all are kept, and the others need not make them again. */
struct made {
    bf16 *tiles;
    int64_t which; /* of a pair's number: its place */
};

/* Two tiles of weights on their way: asked for ahead of their use, and made one turn before it, so that loading them
   need not wait for the stores. */
INLINE void make(const int bits, const void *small, int64_t i, int64_t pieces, const struct made *made) {
    if (i >= pieces) return;
    const char *w = (const char *)small + 2 * i * tile_bytes(bits);
    bf16 *to = made->tiles + (i & made->which) * 2 * TILE;
    fetch((const bf16 *)(w + AHEAD), tile_bytes(bits)); /* two tiles, in bf16's of 2 bytes */
    for (int j = 0; j < 2; j++, w += tile_bytes(bits), to += TILE)
        if (bits == 4) expand4((const void *)w, to);
        else expand8((const void *)w, to);
}

/* sums[m][c] = sum over k of x[m][k] * w[c][k], for 16 or 32 rows m and 32 columns c.

   The weights stream through once; x stays in the L1 cache.  In oneDNN's blocks, w is the right operand: 16 pairs of k,
   32 columns, 2 are two tiles side by side.  `again`: they have just been used and are in the L2 cache. */
INLINE void multiply(const bf16 *x, int two, int64_t k, const bf16 *w, int again, float sums[ROWS][COLUMNS]) {
    const bf16 *lower = x + 16 * k;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < k; i += 32, w += 2 * TILE) {
        if (!again) fetch(w + AHEAD / 2, 2 * TILE);
        _tile_loadd(4, w, 128); _tile_loadd(5, w + 32, 128);
        _tile_loadd(6, x + i, k * 2);
        _tile_dpbf16ps(0, 6, 4); _tile_dpbf16ps(1, 6, 5);
        if (two) {
            _tile_loadd(7, lower + i, k * 2);
            _tile_dpbf16ps(2, 7, 4); _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, sums[0], 128); _tile_stored(1, sums[0] + 16, 128);
    if (two) { _tile_stored(2, sums[16], 128); _tile_stored(3, sums[16] + 16, 128); }
}

/* The same with small weights, which are made as rows: now they are the left operand, x (see `operand`) is the right
   one, and the result comes out with rows and columns exchanged.  The order of the sums is the same. */
INLINE void multiply_small(
    const int bits, const bf16 *x, int two, int64_t k, const void *w, const int again, const struct made *made,
    float sums[ROWS][COLUMNS]
) {
    const bf16 *lower = x + 16 * k;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    if (!again) make(bits, w, 0, k / 32, made);
    for (int64_t i = 0; i < k / 32; i++) {
        if (!again) make(bits, w, i + 1, k / 32, made);
        const bf16 *tiles = made->tiles + (i & made->which) * 2 * TILE;
        _tile_loadd(4, tiles, 64); _tile_loadd(5, tiles + TILE, 64);
        _tile_loadd(6, x + i * TILE, 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 5, 6);
        if (two) {
            _tile_loadd(7, lower + i * TILE, 64);
            _tile_dpbf16ps(2, 4, 7); _tile_dpbf16ps(3, 5, 7);
        }
    }
    __m512i columns[4][16];
    _tile_stored(0, columns[0], 64); _tile_stored(1, columns[1], 64);
    if (two) { _tile_stored(2, columns[2], 64); _tile_stored(3, columns[3], 64); }
    for (int i = 0; i < (two ? 4 : 2); i++) {
        transpose(columns[i]);
        for (int m = 0; m < 16; m++) _mm512_store_si512(sums[i / 2 * 16 + m] + i % 2 * 16, columns[i][m]);
    }
}

/* The left side x (n, k) of a product in the layout that the right side asks for: as it is, or, with small weights, in
   groups of 16 rows: (k / 2 pairs, 16 rows, 2). */
struct operand {
    const bf16 *x;
    int64_t n, k, bits; /* bits: of the weights */
};

/* Whether n rows of k are multiplied with small weights; more come in several groups, for each of which the weights
   would be made anew. */
INLINE int few(int64_t n, int64_t k) { return n <= GROUP && up(n, 16) * k <= MOST; }

/* x has rows of anything up to a multiple of 16; pairs: room for as much if they are `few`. */
static struct operand operand(const struct matrix *w, const bf16 *x, int64_t n, int64_t k, bf16 *pairs) {
    if (w->bits == 16 || !few(n, k)) return (struct operand){x, n, k, 16};
    for (int64_t m = 0; m < n; m += 16)
        for (int64_t i = 0; i < k; i += 32) {
            __m512i r[16];
            for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512(x + (m + j) * k + i);
            transpose(r);
            for (int j = 0; j < 16; j++) _mm512_store_si512(pairs + m * k + i * 16 + j * 32, r[j]);
        }
    return (struct operand){pairs, n, k, w->bits};
}

/* 32 rows (from `first`) and 32 columns of x w^T.  tiles: room for 32 x k small weights, which a call for the first rows
   of a group leaves there for the calls for the others. */
static void product(
    const struct operand *x, int64_t first, const struct matrix *w, int64_t column, bf16 *tiles,
    float sums[ROWS][COLUMNS]
) {
    const int64_t k = x->k;
    const int two = x->n - first > 16, again = first % GROUP != 0;
    const struct made made = {tiles, x->n > ROWS ? INT64_MAX : 1};
    const char *small = (const char *)w->small + column / 16 * (k / 32) * tile_bytes(w->bits);
    const bf16 *at = x->x + first * k;
    if (x->bits == 16) multiply(at, two, k, w->blocks + column * k, again, sums);
    else if (again) multiply_small(4, at, two, k, small, 1, &made, sums); /* made: in however many bits they were */
    else if (w->bits == 4) multiply_small(4, at, two, k, small, 0, &made, sums);
    else multiply_small(8, at, two, k, small, 0, &made, sums);
}
