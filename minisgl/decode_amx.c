/* One decode step of a Llama, whole, for a CPU with AMX: one new token for each of n sequences, bfloat16.

   Compiled on the user's machine when a C compiler is there (see ops_amx.py, which also says when it is used); without
   one the same step runs in torch, slower.  A decode step is bound by memory: every weight is read once per step, for
   16 sequences as for one, and that is all it should take.  In torch it is some 900 calls, each of which wakes the
   threads, reads its operands and writes its result.  Here it is one, in which the threads meet at barriers:

       embed | norm | qkv | rotate, write K V | attend | o + residual | norm | gate up silu | down + residual | ... norm
                    `------------------------------- for each layer -----------------------------------------'

   A product x W^T has few rows (x: one per sequence) and many columns.  W is kept in oneDNN's layout, in blocks of 32
   columns (see `product`); a thread takes a block, multiplies, does the element-wise work on the result while it is in
   the L1 cache, and takes the next.  AMX's unit of work is the tile, 16 rows of 64 bytes:

       C (16 rows x 16 columns, float32)  +=  A (16 rows x 32 k)  *  B (16 pairs of k x 16 columns x 2)

   A row's result is the same whatever else is in the batch: its sums are always taken in the same order.

   Source of AMX's semantics: Intel's Architecture Instruction Set Extensions reference, chapter 3. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* torch has an OpenMP library loaded, whose threads are used: this is what `#pragma omp parallel` is compiled to */
void GOMP_parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))
enum { ROWS = 32, COLUMNS = 32 };         /* of a block */
enum { MAX_LAYERS = 512, PHASES = 8 };    /* that there are counters for */
enum { SPINS = 500 };

/* ---- what Python passes: the same structures are in ops_amx.py; pointers may be null where the model has none ---- */

struct layer {
    const bf16 *input_norm, *qkv, *o, *post_norm, *gate, *up, *down;
    const bf16 *qkv_bias, *o_bias, *gate_bias, *up_bias, *down_bias, *qk_norm;
    int64_t window; /* tokens, 0: none */
};

struct model {
    int64_t layers, vocabulary, hidden, heads, kv_heads, dim, intermediate;
    double eps;
    const bf16 *embed, *final_norm;
    const struct layer *layer;
};

struct step {
    int64_t n;                                /* sequences */
    const int64_t *ids, *positions, *slots;   /* (n,) */
    const int32_t *lengths, *rows;            /* (n,) */
    const int32_t *table;                     /* (.., table_stride): slot of each position of a row */
    int64_t table_stride, longest;            /* longest: at least every length */
    const float *rope;                        /* (.., dim): cosines, then sines, of each position */
    bf16 *kv;                                 /* (layers, 2, slots, kv_heads, dim) */
    int64_t slots_in_pool;
    bf16 *out;                                /* (n, hidden): states after the last norm */
    char *work;                               /* `work_bytes` */
    int64_t threads;
};

/* ---- bfloat16 ---- */

INLINE __m512 load(const bf16 *p) { /* 16 numbers */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

INLINE void store(bf16 *p, __m512 x) { /* rounds to nearest even */
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

INLINE __m512 rounded(__m512 x) { /* to what bfloat16 can hold */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

INLINE void fetch(const bf16 *p, int64_t count) { /* into the caches; asks and does not wait */
    for (int64_t i = 0; i < count; i += 32) _mm_prefetch((const char *)(p + i), _MM_HINT_T0);
}

INLINE __m512 exponential(__m512 x) { /* e^x, 2e-7 relative: 2^n times a polynomial for the rest in [-1/2, 1/2] */
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 n = _mm512_roundscale_ps(t, 0), f = _mm512_sub_ps(t, n);
    __m512 y = _mm512_set1_ps(1.54035304e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.33335581e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.61812911e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.55041087e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40226507e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93147181e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* ---- threads ---- */

struct team {
    atomic_int turn, arrived, asleep;
    atomic_long taken[MAX_LAYERS][PHASES] __attribute__((aligned(64)));
};

/* All threads wait for each other.  They spin for some 20 us, longer than a phase's ends are usually apart; after that
   the one that is missing probably lacks a core, so they sleep and leave it theirs. */
static void meet(struct team *team, int threads) {
    const int turn = atomic_load(&team->turn);
    if (atomic_fetch_add(&team->arrived, 1) == threads - 1) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->turn, turn + 1);
        if (atomic_load(&team->asleep)) syscall(SYS_futex, &team->turn, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
        return;
    }
    for (int spins = 0; spins < SPINS; spins++) {
        if (atomic_load(&team->turn) != turn) return;
        _mm_pause();
    }
    atomic_fetch_add(&team->asleep, 1);
    while (atomic_load(&team->turn) == turn) syscall(SYS_futex, &team->turn, FUTEX_WAIT_PRIVATE, turn, 0, 0, 0);
    atomic_fetch_sub(&team->asleep, 1);
}

/* i = 0 .. total - 1 shared out: one each to begin with, then whoever is free takes the next */
#define SHARE(i, total, counter) \
    for (int64_t i = thread; i < (total); i = threads + atomic_fetch_add(&(counter), 1))

/* ---- matrix products ---- */

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

/* sums[m][c] = sum over k of x[m][k] * w[c][k], for 16 or 32 rows m and 32 columns c.

   w: the block's (k / 32) pieces of 16 pairs of k, 32 columns, 2: two tiles side by side.  They stream through once,
   so they are asked for ahead of their use; x (k numbers to a row) stays in the L1 cache. */
INLINE void product(const bf16 *x, int two, int64_t k, const bf16 *w, float sums[ROWS][COLUMNS]) {
    const bf16 *lower = x + 16 * k;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < k; i += 32, w += 32 * COLUMNS) {
        fetch(w + 4 * 32 * COLUMNS, 32 * COLUMNS);
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

INLINE __m512 plus_bias(const float *sums, const bf16 *bias, int64_t column) {
    const __m512 x = _mm512_loadu_ps(sums);
    return bias ? _mm512_add_ps(x, load(bias + column)) : x;
}

/* Columns column .. column + 31 of out (n, width) = x w^T + bias, or of out += that. */
static void linear(
    const bf16 *x, int64_t n, int64_t k, const bf16 *w, const bf16 *bias, int add, bf16 *out, int64_t width,
    int64_t column
) {
    float sums[ROWS][COLUMNS] __attribute__((aligned(64)));
    for (int64_t first = 0; first < n; first += ROWS) {
        const int64_t count = n - first < ROWS ? n - first : ROWS;
        product(x + first * k, count > 16, k, w + column * k, sums);
        for (int64_t m = 0; m < count; m++)
            for (int64_t c = 0; c < COLUMNS; c += 16) {
                bf16 *at = out + (first + m) * width + column + c;
                const __m512 y = plus_bias(sums[m] + c, bias, column + c);
                store(at, add ? _mm512_add_ps(y, load(at)) : y);
            }
    }
}

/* The same columns of out (n, width) = silu(x gate^T) * (x up^T), SwiGLU's (arXiv 2002.05202) gating. */
static void gated(
    const bf16 *x, int64_t n, int64_t k, const struct layer *l, bf16 *out, int64_t width, int64_t column
) {
    float gates[ROWS][COLUMNS] __attribute__((aligned(64))), ups[ROWS][COLUMNS] __attribute__((aligned(64)));
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (int64_t first = 0; first < n; first += ROWS) {
        const int64_t count = n - first < ROWS ? n - first : ROWS;
        product(x + first * k, count > 16, k, l->gate + column * k, gates);
        product(x + first * k, count > 16, k, l->up + column * k, ups);
        for (int64_t m = 0; m < count; m++)
            for (int64_t c = 0; c < COLUMNS; c += 16) {
                const __m512 gate = plus_bias(gates[m] + c, l->gate_bias, column + c);
                const __m512 up = plus_bias(ups[m] + c, l->up_bias, column + c);
                const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, exponential(_mm512_sub_ps(zero, gate))));
                store(out + (first + m) * width + column + c, _mm512_mul_ps(silu, up));
            }
    }
}

/* ---- norms, rotation ---- */

/* RMSNorm of n numbers; rounded before the weight is applied, as Hugging Face's LlamaRMSNorm is. */
INLINE void rms_norm(const bf16 *x, const bf16 *weight, int64_t n, double eps, bf16 *out) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / n + (float)eps));
    for (int64_t i = 0; i < n; i += 16)
        store(out + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(x + i), scale)), load(weight + i)));
}

/* Turns the pairs (x_i, x_{i + dim/2}) of one head by the angles whose cosines and sines are in `rope`. */
INLINE void rotate(bf16 *x, int64_t dim, const float *rope) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const __m512 a = load(x + i), b = load(x + half + i);
        const __m512 cos = _mm512_loadu_ps(rope + i), sin = _mm512_loadu_ps(rope + half + i);
        store(x + i, _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin)));
        store(x + half + i, _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin)));
    }
}

/* ---- attention ---- */

/* `count` query heads of one sequence over the keys first .. length - 1 of their KV head, found through `slots`.
   q, out: (count, dim).  keys, values: of slot 0; `stride` numbers from one slot to the next.  Count and dim are
   constants where this is called, so that the accumulators stay in registers. */
INLINE void attend(
    const int count, const int dim, const bf16 *q, const bf16 *keys, const bf16 *values, int64_t stride,
    const int32_t *slots, int64_t first, int64_t length, float scale, float *scores, int64_t scores_width, bf16 *out
) {
    __m512bh query[4][4];
    float largest[4];
    for (int h = 0; h < count; h++) {
        largest[h] = -INFINITY;
        for (int i = 0; i < dim / 32; i++) query[h][i] = (__m512bh)_mm512_loadu_si512(q + h * dim + 32 * i);
    }
    for (int64_t j = first; j < length; j++) {
        const bf16 *key = keys + slots[j] * stride;
        if (j + 8 < length) fetch(keys + slots[j + 8] * stride, dim);
        for (int h = 0; h < count; h++) {
            __m512 sum = _mm512_setzero_ps();
            for (int i = 0; i < dim / 32; i++)
                sum = _mm512_dpbf16_ps(sum, query[h][i], (__m512bh)_mm512_loadu_si512(key + 32 * i));
            const float score = _mm512_reduce_add_ps(sum) * scale;
            scores[h * scores_width + j - first] = score;
            if (score > largest[h]) largest[h] = score;
        }
    }
    const int64_t seen = length - first;
    float total[4];
    for (int h = 0; h < count; h++) {
        float *p = scores + h * scores_width;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t j = seen; j % 16; j++) p[j] = -1e30f; /* up to a multiple of 16: e^x is 0 */
        for (int64_t j = 0; j < seen; j += 16) {
            const __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(p + j), _mm512_set1_ps(largest[h])));
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
        if (j + 8 < seen) fetch(values + slots[first + j + 8] * stride, dim);
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

/* ---- the step ---- */

INLINE int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* Where things are in the workspace, in bytes; rows are padded to whole tiles. */
struct layout {
    int64_t residual, normed, qkv, mixed, gated, scores, scores_width, end;
};

static struct layout lay_out(const struct model *m, int64_t n, int64_t longest, int64_t threads) {
    const int64_t rows = up(n, 16), width = (m->heads + 2 * m->kv_heads) * m->dim;
    struct layout at;
    at.residual = up(sizeof(struct team), 64);
    at.normed = at.residual + rows * m->hidden * 2;
    at.qkv = at.normed + rows * m->hidden * 2;
    at.mixed = at.qkv + rows * width * 2;
    at.gated = at.mixed + rows * m->heads * m->dim * 2;
    at.scores = up(at.gated + rows * m->intermediate * 2, 64);
    at.scores_width = up(longest, 16);
    at.end = at.scores + threads * 4 * at.scores_width * 4;
    return at;
}

int64_t work_bytes(const struct model *m, int64_t n, int64_t longest, int64_t threads) {
    return lay_out(m, n, longest, threads).end;
}

/* Whether the kernel lets this process use AMX (Linux asks to be asked: Documentation/arch/x86/xstate.rst). */
int allowed(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0; }

static void run(const struct model *m, const struct step *s, int thread, int threads) {
    const struct layout at = lay_out(m, s->n, s->longest, s->threads);
    struct team *team = (void *)s->work;
    bf16 *residual = (void *)(s->work + at.residual), *normed = (void *)(s->work + at.normed);
    bf16 *qkv = (void *)(s->work + at.qkv), *mixed = (void *)(s->work + at.mixed);
    bf16 *gate_up = (void *)(s->work + at.gated);
    float *scores = (float *)(s->work + at.scores) + thread * 4 * at.scores_width;
    const int64_t n = s->n, hidden = m->hidden, dim = m->dim, heads = m->heads, kv_heads = m->kv_heads;
    const int64_t group = heads / kv_heads, width = (heads + 2 * kv_heads) * dim, stride = kv_heads * dim;

    for (int64_t b = thread; b < n; b += threads)
        memcpy(residual + b * hidden, m->embed + s->ids[b] * hidden, hidden * 2);
    for (int64_t i = 0; i < m->layers; i++) {
        const struct layer *l = m->layer + i;
        atomic_long *taken = team->taken[i];
        bf16 *keys = s->kv + 2 * i * s->slots_in_pool * stride, *values = keys + s->slots_in_pool * stride;
        if (i) meet(team, threads);
        for (int64_t b = thread; b < n; b += threads)
            rms_norm(residual + b * hidden, l->input_norm, hidden, m->eps, normed + b * hidden);
        meet(team, threads);
        SHARE(c, width / COLUMNS, taken[0])
            linear(normed, n, hidden, l->qkv, l->qkv_bias, 0, qkv, width, c * COLUMNS);
        meet(team, threads);
        for (int64_t b = thread; b < n; b += threads) {
            bf16 *mine = qkv + b * width;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                if (l->qk_norm) rms_norm(mine + h * dim, l->qk_norm + h * dim, dim, m->eps, mine + h * dim);
                rotate(mine + h * dim, dim, s->rope + s->positions[b] * dim);
            }
            memcpy(keys + s->slots[b] * stride, mine + heads * dim, stride * 2);
            memcpy(values + s->slots[b] * stride, mine + heads * dim + stride, stride * 2);
        }
        meet(team, threads); /* every K and V is written before any is read */
        SHARE(item, n * kv_heads, taken[1]) {
            const int64_t b = item / kv_heads, h = item % kv_heads, length = s->lengths[b];
            const int64_t first = l->window && length > l->window ? length - l->window : 0;
            attend_group(
                group, dim, qkv + b * width + h * group * dim, keys + h * dim, values + h * dim, stride,
                s->table + s->rows[b] * s->table_stride, first, length, scores, at.scores_width,
                mixed + (b * heads + h * group) * dim);
        }
        meet(team, threads);
        SHARE(c, hidden / COLUMNS, taken[2])
            linear(mixed, n, heads * dim, l->o, l->o_bias, 1, residual, hidden, c * COLUMNS);
        meet(team, threads);
        for (int64_t b = thread; b < n; b += threads)
            rms_norm(residual + b * hidden, l->post_norm, hidden, m->eps, normed + b * hidden);
        meet(team, threads);
        SHARE(c, m->intermediate / COLUMNS, taken[3])
            gated(normed, n, hidden, l, gate_up, m->intermediate, c * COLUMNS);
        meet(team, threads);
        SHARE(c, hidden / COLUMNS, taken[4])
            linear(gate_up, n, m->intermediate, l->down, l->down_bias, 1, residual, hidden, c * COLUMNS);
    }
    meet(team, threads);
    for (int64_t b = thread; b < n; b += threads)
        rms_norm(residual + b * hidden, m->final_norm, hidden, m->eps, s->out + b * hidden);
}

struct job {
    const struct model *model;
    const struct step *step;
};

static void step_on_thread(void *argument) {
    const struct job *job = argument;
    struct tiles before;
    use_tiles(&before);
    run(job->model, job->step, omp_get_thread_num(), omp_get_num_threads());
    restore_tiles(&before);
}

/* 0; or, with nothing computed, -1 if an id is not in the vocabulary, -2 if a length or position is out of bounds, -3
   if a slot is not in the pool or a length exceeds the table. */
int decode_step(const struct model *m, const struct step *s) {
    struct job job = {m, s};
    for (int64_t b = 0; b < s->n; b++) {
        if (s->ids[b] < 0 || s->ids[b] >= m->vocabulary) return -1;
        if (s->lengths[b] < 1 || s->lengths[b] > s->longest) return -2;
        if (s->positions[b] < 0 || s->positions[b] >= s->longest) return -2;
        if (s->slots[b] < 0 || s->slots[b] >= s->slots_in_pool || s->lengths[b] > s->table_stride) return -3;
    }
    memset(s->work, 0, sizeof(struct team));
    GOMP_parallel(step_on_thread, &job, s->threads, 0);
    return 0;
}

/* ---- logits ---- */

struct projection {
    const bf16 *x, *w;
    int64_t n, k, columns;
    float *out;
    atomic_long taken;
};

static void project_on_thread(void *argument) {
    struct projection *p = argument;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    struct tiles before;
    use_tiles(&before);
    float sums[ROWS][COLUMNS] __attribute__((aligned(64)));
    SHARE(c, p->columns / COLUMNS, p->taken)
        for (int64_t first = 0; first < p->n; first += ROWS) {
            const int64_t count = p->n - first < ROWS ? p->n - first : ROWS;
            product(p->x + first * p->k, count > 16, p->k, p->w + c * COLUMNS * p->k, sums);
            for (int64_t m = 0; m < count; m++)
                memcpy(p->out + (first + m) * p->columns + c * COLUMNS, sums[m], sizeof sums[m]);
        }
    restore_tiles(&before);
}

/* out (n, columns) float32 = x (n, k) w^T.  x has rows of anything up to a multiple of 16. */
void project(const bf16 *x, int64_t n, int64_t k, const bf16 *w, int64_t columns, float *out, int64_t threads) {
    struct projection p = {.x = x, .w = w, .n = n, .k = k, .columns = columns, .out = out};
    GOMP_parallel(project_on_thread, &p, threads, 0);
}
