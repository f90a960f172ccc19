/* What the other parts of decode_amx.c use: bfloat16 in registers of 16 float32, and threads that work in phases. */

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
enum { SPINS = 500 };

INLINE int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

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

/* Indices of the two halves of a vector, side by side: 0, 16, 1, 17, ... */
#define HALVES _mm512_set_epi16( \
    31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, \
    23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0)

INLINE __m512i in_pairs(__m512 a, __m512 b) { /* as bfloat16: a[0], b[0], a[1], ... */
    return _mm512_permutexvar_epi16(HALVES, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

/* 16 of the 32 bfloat16 in a and in b, from the one at `first` (0 or 16) on: a[first], b[first], a[first + 1], ... */
INLINE __m512i pairs_of(__m512i a, __m512i b, const int first) {
    const __m512i in_b = _mm512_set1_epi32(16 << 16); /* b's numbers come 32 after a's */
    return _mm512_permutex2var_epi16(a, _mm512_add_epi16(_mm512_add_epi16(HALVES, in_b), _mm512_set1_epi16(first)), b);
}

INLINE void fetch(const bf16 *p, int64_t count) { /* into the L2 cache, which can wait for more at once than L1 */
    for (int64_t i = 0; i < count; i += 32) _mm_prefetch((const char *)(p + i), _MM_HINT_T1);
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

/* 16 rows of 16 numbers of 32 bits, turned into columns. */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
            t[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xDD);
        }
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
    }
}

/* ---- threads ---- */

struct counter { atomic_long taken; char alone[56]; }; /* a cache line each */
struct team { /* in the workspace, zero at first */
    atomic_int turn, arrived, asleep;
    int64_t alone[6];
    struct counter counters[]; /* two for each thread */
};

static int64_t team_bytes(int64_t threads) { return sizeof(struct team) + 2 * threads * sizeof(struct counter); }

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

/* i = 0 .. total - 1 shared out: a range each, in order, so that what is asked for ahead is one's own; who is through
   with it helps the next thread.  There has to be a `meet` between two shares, which use the counters in turn. */
struct share {
    struct counter *counters;
    int64_t total, thread, threads, helped;
};

static struct share begin(struct team *team, int thread, int threads, int64_t total, int *phase) {
    struct counter *now = team->counters + (*phase)++ % 2 * threads, *later = team->counters + *phase % 2 * threads;
    atomic_store(&later[thread].taken, 0);
    return (struct share){now, total, thread, threads, 0};
}

static int64_t take(struct share *s) { /* -1: nothing is left */
    for (; s->helped < s->threads; s->helped++) {
        const int64_t whose = (s->thread + s->helped) % s->threads;
        const int64_t i = s->total * whose / s->threads + atomic_fetch_add(&s->counters[whose].taken, 1);
        if (i < s->total * (whose + 1) / s->threads) return i;
    }
    return -1;
}

#define SHARE(i, total) \
    for (struct share share = begin(team, thread, threads, total, &phase), *once = &share; once; once = 0) \
        for (int64_t i; (i = take(&share)) >= 0;)
