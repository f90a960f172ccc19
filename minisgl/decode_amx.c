/* One step of a Llama, whole, for a CPU with AMX: the new tokens of several sequences, one each (decodes) or many (of
   prompts), in bfloat16.

   Compiled on the user's machine when a C compiler is there (see ops_amx.py, which also says when it is used); without
   one the same step runs in torch, slower.  A decode step is bound by memory: every weight is read once per step, for
   16 sequences as for one, and that is all it should take.  In torch it is some 900 calls, each of which wakes the
   threads, reads its operands and writes its result.  Here it is one, in which the threads meet at barriers:

       embed | norm | qkv | rotate, write K V | attend | o + residual | norm | gate up silu | down + residual | ... norm
                    `------------------------------- for each layer -----------------------------------------'

   A product x W^T has few rows (x: one per token) and many columns.  W is kept in blocks of 32 columns; a thread takes
   a block, multiplies, does the element-wise work on the result while it is in the L1 cache, and takes the next.  AMX's
   unit of work is the tile, 16 rows of 64 bytes:

       C (16 rows x 16 columns, float32)  +=  A (16 rows x 32 k)  *  B (16 pairs of k x 16 columns x 2)

   A token's result is the same whatever else is in the step, whether it is a prompt's or a decode, and however a
   prompt is cut into steps: its sums are always taken in the same order.

   The parts, in the order in which they build on each other:

       decode_amx_basics.h      bfloat16, threads that work in phases
       decode_amx_weights.h     weights in 4 or 8 bits, exact
       decode_amx_products.h    tiles, matrix products
       decode_amx_attention.h   of one new token, or several of one sequence

   Source of AMX's semantics: Intel's Architecture Instruction Set Extensions reference, chapter 3. */

#include "decode_amx_basics.h"
#include "decode_amx_weights.h"
#include "decode_amx_products.h"
#include "decode_amx_attention.h"

/* ---- what Python passes: the same structures are in ops_amx.py; pointers may be null where the model has none ---- */

struct layer {
    struct matrix qkv, o, gate, up, down; /* gate and up are both small or neither is: they share an `operand` */
    const bf16 *input_norm, *post_norm, *qkv_bias, *o_bias, *gate_bias, *up_bias, *down_bias, *qk_norm;
    int64_t window; /* tokens, 0: none */
};

struct model {
    int64_t layers, vocabulary, hidden, heads, kv_heads, dim, intermediate;
    double eps;
    const bf16 *embed, *final_norm;
    const struct layer *layer;
};

struct step {
    int64_t n, sequences;                     /* new tokens; of so many sequences */
    const int64_t *ids, *positions, *slots;   /* (n,) */
    const int32_t *starts;                    /* (sequences + 1,): a sequence's first new token */
    const int32_t *lengths, *rows;            /* (sequences,): tokens with the new ones, and row of the table */
    const int32_t *table;                     /* (.., table_stride): slot of each position of a row */
    int64_t table_stride, longest;            /* longest: at least every length */
    const float *rope;                        /* (.., dim): cosines, then sines, of each position */
    bf16 *kv;                                 /* (layers, 2, slots, kv_heads, dim) */
    int64_t slots_in_pool;
    bf16 *out;                                /* (n, hidden): states after the last norm */
    char *work;                               /* `work_bytes` */
    int64_t threads;
};

/* ---- linear layers ---- */

INLINE __m512 plus_bias(const float *sums, const bf16 *bias, int64_t column) {
    const __m512 x = _mm512_loadu_ps(sums);
    return bias ? _mm512_add_ps(x, load(bias + column)) : x;
}

/* A result's columns come in blocks, its rows in groups; a `part` is one block of one group. */
static int64_t parts(int64_t n, int64_t width) { return up(n, GROUP) / GROUP * (width / COLUMNS); }

/* A part of out (n, width) = x w^T + bias, or of out += that. */
static void linear(
    const struct operand *x, const struct matrix *w, const bf16 *bias, int add, bf16 *out, int64_t width, int64_t part,
    bf16 *tiles
) {
    float sums[ROWS][COLUMNS] __attribute__((aligned(64)));
    const int64_t column = part % (width / COLUMNS) * COLUMNS, begin = part / (width / COLUMNS) * GROUP;
    for (int64_t first = begin; first < x->n && first < begin + GROUP; first += ROWS) {
        product(x, first, w, column, tiles, sums);
        for (int64_t m = 0; m < ROWS && first + m < x->n; m++)
            for (int64_t c = 0; c < COLUMNS; c += 16) {
                bf16 *at = out + (first + m) * width + column + c;
                const __m512 y = plus_bias(sums[m] + c, bias, column + c);
                store(at, add ? _mm512_add_ps(y, load(at)) : y);
            }
    }
}

/* A part of out (n, width) = silu(x gate^T) * (x up^T), SwiGLU's (arXiv 2002.05202) gating. */
static void gated(
    const struct operand *x, const struct layer *l, bf16 *out, int64_t width, int64_t part, bf16 *tiles
) {
    float gates[ROWS][COLUMNS] __attribute__((aligned(64))), ups[ROWS][COLUMNS] __attribute__((aligned(64)));
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    const int64_t column = part % (width / COLUMNS) * COLUMNS, begin = part / (width / COLUMNS) * GROUP;
    for (int64_t first = begin; first < x->n && first < begin + GROUP; first += ROWS) {
        product(x, first, &l->gate, column, tiles, gates);
        product(x, first, &l->up, column, tiles + COLUMNS * x->k, ups);
        for (int64_t m = 0; m < ROWS && first + m < x->n; m++)
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

/* ---- the step ---- */

/* Where things are in the workspace, in bytes; rows are padded to whole tiles. */
struct layout {
    int64_t pieces, residual, normed, qkv, mixed, gated, own, tiles, scores, own_size, end; /* own: a thread's */
};

static struct layout lay_out(const struct model *m, int64_t n, int64_t longest, int64_t threads) {
    const int64_t rows = up(n, ROWS), inner = m->heads * m->dim;
    int64_t wide = m->intermediate > inner ? m->intermediate : inner;
    if (wide < m->hidden) wide = m->hidden;
    struct layout at;
    at.pieces = up(team_bytes(threads), 64);
    at.residual = up(at.pieces + n * sizeof(struct piece), 64);
    at.normed = at.residual + rows * m->hidden * 2;
    at.qkv = at.normed + rows * m->hidden * 2;
    at.mixed = at.qkv + rows * (m->heads + 2 * m->kv_heads) * m->dim * 2;
    at.gated = at.mixed + rows * inner * 2;
    at.own = at.gated + rows * m->intermediate * 2;
    at.tiles = (rows * wide < MOST ? rows * wide : MOST) * 2; /* after `operand`'s, in a thread's own part */
    at.scores = at.tiles + 2 * COLUMNS * wide * 2;
    at.own_size = at.scores + MOST_LANES * up(longest, KEYS) * 4;
    at.end = at.own + threads * at.own_size;
    return at;
}

int64_t work_bytes(const struct model *m, int64_t n, int64_t longest, int64_t threads) {
    return lay_out(m, n, longest, threads).end;
}

/* A piece ends with its sequence or after 16 tokens.  Decodes may follow each other in one sequence. */
static int64_t cut(const struct step *s, struct piece *pieces) {
    int64_t count = 0;
    struct piece *last = 0;
    for (int64_t i = 0; i < s->sequences; i++) {
        const int32_t *slots = s->table + s->rows[i] * s->table_stride;
        for (int64_t t = s->starts[i]; t < s->starts[i + 1]; t++) {
            const int64_t seen = s->lengths[i] - (s->starts[i + 1] - t) + 1;
            if (last && slots == last->slots && seen == last->seen + last->count && last->count < 16) last->count++;
            else *(last = pieces + count++) = (struct piece){t, 1, seen, slots};
        }
    }
    return count;
}

static void run(const struct model *m, const struct step *s, int64_t num_pieces, int thread, int threads) {
    const struct layout at = lay_out(m, s->n, s->longest, s->threads);
    struct team *team = (void *)s->work;
    const struct piece *pieces = (void *)(s->work + at.pieces);
    bf16 *residual = (void *)(s->work + at.residual), *normed = (void *)(s->work + at.normed);
    bf16 *qkv = (void *)(s->work + at.qkv), *mixed = (void *)(s->work + at.mixed);
    bf16 *gate_up = (void *)(s->work + at.gated), *pairs = (void *)(s->work + at.own + thread * at.own_size);
    bf16 *tiles = (void *)((char *)pairs + at.tiles);
    float *scores = (void *)((char *)pairs + at.scores);
    const int64_t n = s->n, hidden = m->hidden, dim = m->dim, heads = m->heads, kv_heads = m->kv_heads;
    const int64_t group = heads / kv_heads, inner = heads * dim, stride = kv_heads * dim, width = inner + 2 * stride;
    int phase = 0;

    for (int64_t b = thread; b < n; b += threads)
        memcpy(residual + b * hidden, m->embed + s->ids[b] * hidden, hidden * 2);
    for (int64_t i = 0; i < m->layers; i++) {
        const struct layer *l = m->layer + i;
        bf16 *keys = s->kv + 2 * i * s->slots_in_pool * stride, *values = keys + s->slots_in_pool * stride;
        if (i) meet(team, threads);
        for (int64_t b = thread; b < n; b += threads)
            rms_norm(residual + b * hidden, l->input_norm, hidden, m->eps, normed + b * hidden);
        meet(team, threads);
        struct operand x = operand(&l->qkv, normed, n, hidden, pairs);
        SHARE(part, parts(n, width)) linear(&x, &l->qkv, l->qkv_bias, 0, qkv, width, part, tiles);
        meet(team, threads);
        for (int64_t b = thread; b < n; b += threads) {
            bf16 *mine = qkv + b * width;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                if (l->qk_norm) rms_norm(mine + h * dim, l->qk_norm + h * dim, dim, m->eps, mine + h * dim);
                rotate(mine + h * dim, dim, s->rope + s->positions[b] * dim);
            }
            memcpy(keys + s->slots[b] * stride, mine + inner, stride * 2);
            memcpy(values + s->slots[b] * stride, mine + inner + stride, stride * 2);
        }
        meet(team, threads); /* every K and V is written before any is read */
        SHARE(item, num_pieces * kv_heads) {
            const struct piece *p = pieces + item / kv_heads;
            const int64_t h = item % kv_heads;
            const struct queries queries = {
                group, p->seen, l->window, qkv + p->first * width + h * group * dim,
                mixed + p->first * inner + h * group * dim, width, inner};
            attend(dim, &queries, p->count, &(struct keys){keys + h * dim, values + h * dim, stride, p->slots}, scores);
        }
        meet(team, threads);
        x = operand(&l->o, mixed, n, inner, pairs);
        SHARE(part, parts(n, hidden)) linear(&x, &l->o, l->o_bias, 1, residual, hidden, part, tiles);
        meet(team, threads);
        for (int64_t b = thread; b < n; b += threads)
            rms_norm(residual + b * hidden, l->post_norm, hidden, m->eps, normed + b * hidden);
        meet(team, threads);
        x = operand(&l->gate, normed, n, hidden, pairs);
        SHARE(part, parts(n, m->intermediate)) gated(&x, l, gate_up, m->intermediate, part, tiles);
        meet(team, threads);
        x = operand(&l->down, gate_up, n, m->intermediate, pairs);
        SHARE(part, parts(n, hidden)) linear(&x, &l->down, l->down_bias, 1, residual, hidden, part, tiles);
    }
    meet(team, threads);
    for (int64_t b = thread; b < n; b += threads)
        rms_norm(residual + b * hidden, m->final_norm, hidden, m->eps, s->out + b * hidden);
}

struct job {
    const struct model *model;
    const struct step *step;
    int64_t pieces;
};

static void step_on_thread(void *argument) {
    const struct job *job = argument;
    struct tiles before;
    use_tiles(&before);
    run(job->model, job->step, job->pieces, omp_get_thread_num(), omp_get_num_threads());
    restore_tiles(&before);
}

/* 0; or, with nothing computed, -1 if an id is not in the vocabulary, -2 if a length or position is out of bounds, -3
   if a slot is not in the pool or a length exceeds the table. */
int compute_step(const struct model *m, const struct step *s) {
    for (int64_t b = 0; b < s->n; b++) {
        if (s->ids[b] < 0 || s->ids[b] >= m->vocabulary) return -1;
        if (s->positions[b] < 0 || s->positions[b] >= s->longest) return -2;
        if (s->slots[b] < 0 || s->slots[b] >= s->slots_in_pool) return -3;
    }
    for (int64_t i = 0; i < s->sequences; i++) {
        const int64_t start = s->starts[i], end = s->starts[i + 1];
        if (start < 0 || end <= start || end > s->n) return -2;
        if (s->lengths[i] < end - start || s->lengths[i] > s->longest) return -2;
        if (s->lengths[i] > s->table_stride) return -3;
    }
    memset(s->work, 0, team_bytes(s->threads));
    struct piece *pieces = (void *)(s->work + lay_out(m, s->n, s->longest, s->threads).pieces);
    struct job job = {m, s, cut(s, pieces)};
    GOMP_parallel(step_on_thread, &job, s->threads, 0);
    return 0;
}

/* ---- logits ---- */

struct projection {
    const bf16 *x;
    const struct matrix *w;
    int64_t n, k, columns;
    char *work;
    float *out;
};

static void project_on_thread(void *argument) {
    struct projection *p = argument;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    struct team *team = (void *)p->work;
    int phase = 0;
    bf16 *pairs = (bf16 *)(p->work + up(team_bytes(threads), 64)) + thread * (up(p->n, 16) + COLUMNS) * p->k;
    bf16 *tiles = pairs + up(p->n, 16) * p->k;
    const struct operand x = operand(p->w, p->x, p->n, p->k, pairs);
    struct tiles before;
    use_tiles(&before);
    float sums[ROWS][COLUMNS] __attribute__((aligned(64)));
    SHARE(c, p->columns / COLUMNS)
        for (int64_t first = 0; first < p->n; first += ROWS) {
            product(&x, first, p->w, c * COLUMNS, tiles, sums);
            for (int64_t m = 0; m < ROWS && first + m < p->n; m++)
                memcpy(p->out + (first + m) * p->columns + c * COLUMNS, sums[m], sizeof sums[m]);
        }
    restore_tiles(&before);
}

int64_t project_bytes(int64_t n, int64_t k, int64_t threads) {
    return up(team_bytes(threads), 64) + threads * (up(n, 16) + COLUMNS) * k * 2;
}

/* out (n, columns) float32 = x (n, k) w^T.  x has rows of anything up to a multiple of 16. */
void project(
    const bf16 *x, int64_t n, int64_t k, const struct matrix *w, int64_t columns, char *work, float *out,
    int64_t threads
) {
    struct projection p = {.x = x, .w = w, .n = n, .k = k, .columns = columns, .work = work, .out = out};
    memset(work, 0, team_bytes(threads));
    GOMP_parallel(project_on_thread, &p, threads, 0);
}

/* ---- small weights ---- */

struct search {
    const bf16 *blocks;
    char *small;
    int64_t bits, tiles;
    atomic_int failed;
};

static void search_on_thread(void *argument) {
    struct search *s = argument;
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t i = s->tiles * thread / threads; i < s->tiles * (thread + 1) / threads; i++) {
        const bf16 *block = s->blocks + i / 2 * 2 * TILE + i % 2 * 32;
        void *to = s->small + i * tile_bytes(s->bits);
        if (atomic_load_explicit(&s->failed, memory_order_relaxed)) return;
        const int fits = s->bits == 4 ? find4(block, to) : find8(block, to);
        if (!fits || !equal(block, to, s->bits)) atomic_store(&s->failed, 1);
    }
}

int64_t small_bytes(int64_t weights, int64_t bits) { return weights / TILE * tile_bytes(bits); }

/* Whether `weights` weights in oneDNN's blocks can be had in tiles of `bits`, which are then in `small`. */
int find(const bf16 *blocks, int64_t weights, int64_t bits, void *small, int64_t threads) {
    struct search s = {.blocks = blocks, .small = small, .bits = bits, .tiles = weights / TILE};
    GOMP_parallel(search_on_thread, &s, threads, 0);
    return !s.failed;
}
