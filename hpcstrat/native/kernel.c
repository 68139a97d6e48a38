/* Sums over the ranks of one worker, through memory that they share.
 *
 * A `Kernel` knows the shared segment: two records per rank, used in turn, and behind them
 * a ring for each rank. A `Sum` is one kind of call: it lays this rank's values out in the
 * ring, posts the header, adds the values of all ranks in the order of the ranks, and
 * writes the results, piece by piece; the next piece is laid out while this one is added.
 *
 * Every wait is bounded. What a call returns says how far it came; Python then waits with
 * its own means, which serve signals and see dead processes, and calls `go_on`. Places and
 * records follow hpcstrat/channel/places.py and hpcstrat/channel/headers.py, which do the
 * same in NumPy. No MPI in here.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

/* Loops over elements: the best instructions that the processor has. An output is one of
 * the inputs, or overlaps with none. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define LOOPS                                                                               \
    __attribute__((target_clones("default", "avx2", "avx512f"), optimize("O3")))
#else
#define LOOPS
#endif
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for
#else
#define EACH _Pragma("GCC ivdep") for
#endif

#define KERNEL_VERSION 1

enum { DONE, HEADER_AWAITED, STEP_AWAITED, DIFFERS, STEP_DIFFERS };
enum { LINE = 64, CHUNK = 8 << 10, UNLOCKED_FROM = 16 << 10 };

/* ---- Types of elements ---------------------------------------------------------------- */

typedef void (*binary)(void *, const void *, const void *, size_t);
typedef void (*convert)(void *, const void *, size_t);
typedef void (*scale)(void *, size_t, double);

#define ADDER(name, type)                                                                   \
    LOOPS static void name(void *out, const void *a, const void *b, size_t count) {         \
        type *total = out;                                                                  \
        const type *left = a, *right = b;                                                   \
        EACH(size_t i = 0; i < count; i++) total[i] = (type)(left[i] + right[i]);           \
    }
ADDER(add_float, float)
ADDER(add_double, double)
/* Signed numbers wrap around as unsigned ones do. */
ADDER(add_uint32, uint32_t)
ADDER(add_uint64, uint64_t)

static void add_complex64(void *out, const void *a, const void *b, size_t count) {
    add_float(out, a, b, 2 * count);
}

static void add_complex128(void *out, const void *a, const void *b, size_t count) {
    add_double(out, a, b, 2 * count);
}

/* As NumPy divides: by a power of two a product has the same bits. */
#define SCALER(name, type)                                                                  \
    LOOPS static void name(void *values, size_t count, double divisor) {                    \
        type *sums = values;                                                                \
        uint64_t whole = (uint64_t)divisor;                                                 \
        if (whole & (whole - 1)) {                                                          \
            type by = (type)divisor;                                                        \
            EACH(size_t i = 0; i < count; i++) sums[i] = sums[i] / by;                      \
        } else {                                                                            \
            type by = (type)(1 / divisor);                                                  \
            EACH(size_t i = 0; i < count; i++) sums[i] = sums[i] * by;                      \
        }                                                                                   \
    }
SCALER(scale_float, float)
SCALER(scale_double, double)

/* As NumPy divides by a complex number whose imaginary part is 0. */
#define COMPLEX_SCALER(name, type)                                                          \
    static void name(void *values, size_t count, double divisor) {                          \
        type *sums = values, ratio = 0, by = 1 / (type)divisor;                             \
        for (size_t i = 0; i < count; i++) {                                                \
            type real = sums[2 * i], imaginary = sums[2 * i + 1];                           \
            sums[2 * i] = (real + imaginary * ratio) * by;                                  \
            sums[2 * i + 1] = (imaginary - real * ratio) * by;                              \
        }                                                                                   \
    }
COMPLEX_SCALER(scale_complex64, float)
COMPLEX_SCALER(scale_complex128, double)

#define CONVERTER(name, from, to)                                                           \
    LOOPS static void name(void *out, const void *in, size_t count) {                       \
        to *result = out;                                                                   \
        const from *values = in;                                                            \
        EACH(size_t i = 0; i < count; i++) result[i] = (to)values[i];                       \
    }
CONVERTER(int8_to_int32, int8_t, int32_t)
CONVERTER(uint8_to_int32, uint8_t, int32_t)
CONVERTER(int16_to_int32, int16_t, int32_t)
CONVERTER(uint16_to_int32, uint16_t, int32_t)
CONVERTER(int32_to_int8, uint32_t, uint8_t)
CONVERTER(int32_to_int16, uint32_t, uint16_t)
CONVERTER(int8_to_double, int8_t, double)
CONVERTER(uint8_to_double, uint8_t, double)
CONVERTER(int16_to_double, int16_t, double)
CONVERTER(uint16_to_double, uint16_t, double)
CONVERTER(int32_to_double, int32_t, double)
CONVERTER(uint32_to_double, uint32_t, double)
CONVERTER(int64_to_double, int64_t, double)
CONVERTER(uint64_to_double, uint64_t, double)

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

LOOPS static void half_to_float(void *out, const void *in, size_t count) {
    uint32_t *result = out;
    const uint16_t *values = in;
    EACH(size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)(values[i] & 0x7fff) << 13;
        uint32_t exponent = bits & (0x7c00u << 13);
        uint32_t wide = bits + (112u << 23);
        uint32_t special = wide + (112u << 23);
        uint32_t subnormal = bits_of(float_of(wide + (1u << 23)) - float_of(113u << 23));
        wide = exponent == (0x7c00u << 13) ? special : exponent ? wide : subnormal;
        result[i] = wide | (uint32_t)(values[i] & 0x8000) << 16;
    }
}

/* Rounds to nearest, ties to even. */
LOOPS static void float_to_half(void *out, const void *in, size_t count) {
    uint16_t *result = out;
    const uint32_t *values = in;
    const uint32_t infinity = 255u << 23, magic = 126u << 23;
    EACH(size_t i = 0; i < count; i++) {
        uint32_t sign = values[i] & 0x80000000u, bits = values[i] ^ sign;
        uint32_t payload = 0x7c00u + ((bits & 0x7fffffu) >> 13);
        payload += payload == 0x7c00u;
        uint32_t subnormal = bits_of(float_of(bits) + float_of(magic)) - magic;
        uint32_t normal = (bits + 0xc8000fffu + (bits >> 13 & 1)) >> 13;
        uint32_t half = bits < 113u << 23 ? subnormal : normal;
        half = bits >= 143u << 23 ? 0x7c00u : half;
        half = bits > infinity ? payload : half;
        result[i] = (uint16_t)(half | sign >> 16);
    }
}

LOOPS static void bfloat16_to_float(void *out, const void *in, size_t count) {
    uint32_t *result = out;
    const uint16_t *values = in;
    EACH(size_t i = 0; i < count; i++) result[i] = (uint32_t)values[i] << 16;
}

LOOPS static void float_to_bfloat16(void *out, const void *in, size_t count) {
    uint16_t *result = out;
    const uint32_t *values = in;
    EACH(size_t i = 0; i < count; i++) {
        uint32_t bits = values[i];
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        uint32_t nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
        result[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

/* How values are added: what they are turned into before, and the sums after. Where
 * nothing is turned, `widen` and `narrow` are NULL. */
typedef struct {
    size_t size, wide, result;
    binary add;
    scale divide;
    convert widen, narrow;
} type;

/* By the code that Python gives, see hpcstrat/native/__init__.py; sums, then means. */
static const type TYPES[][2] = {
    {{4, 4, 4, add_float, NULL, NULL, NULL}, {4, 4, 4, add_float, scale_float, NULL, NULL}},
    {{8, 8, 8, add_double, NULL, NULL, NULL}, {8, 8, 8, add_double, scale_double, NULL, NULL}},
    {{8, 8, 8, add_complex64, NULL, NULL, NULL},
     {8, 8, 8, add_complex64, scale_complex64, NULL, NULL}},
    {{16, 16, 16, add_complex128, NULL, NULL, NULL},
     {16, 16, 16, add_complex128, scale_complex128, NULL, NULL}},
    {{2, 4, 2, add_float, NULL, half_to_float, float_to_half},
     {2, 4, 2, add_float, scale_float, half_to_float, float_to_half}},
    {{2, 4, 2, add_float, NULL, bfloat16_to_float, float_to_bfloat16},
     {2, 4, 2, add_float, scale_float, bfloat16_to_float, float_to_bfloat16}},
    {{1, 4, 1, add_uint32, NULL, int8_to_int32, int32_to_int8},
     {1, 8, 8, add_double, scale_double, int8_to_double, NULL}},
    {{1, 4, 1, add_uint32, NULL, uint8_to_int32, int32_to_int8},
     {1, 8, 8, add_double, scale_double, uint8_to_double, NULL}},
    {{2, 4, 2, add_uint32, NULL, int16_to_int32, int32_to_int16},
     {2, 8, 8, add_double, scale_double, int16_to_double, NULL}},
    {{2, 4, 2, add_uint32, NULL, uint16_to_int32, int32_to_int16},
     {2, 8, 8, add_double, scale_double, uint16_to_double, NULL}},
    {{4, 4, 4, add_uint32, NULL, NULL, NULL},
     {4, 8, 8, add_double, scale_double, int32_to_double, NULL}},
    {{4, 4, 4, add_uint32, NULL, NULL, NULL},
     {4, 8, 8, add_double, scale_double, uint32_to_double, NULL}},
    {{8, 8, 8, add_uint64, NULL, NULL, NULL},
     {8, 8, 8, add_double, scale_double, int64_to_double, NULL}},
    {{8, 8, 8, add_uint64, NULL, NULL, NULL},
     {8, 8, 8, add_double, scale_double, uint64_to_double, NULL}},
};
enum { NUM_TYPES = sizeof TYPES / sizeof *TYPES };

/* ---- Copies --------------------------------------------------------------------------- */

/* Store past the cache, where a processor can: the caller ends its stores by a `fence`. */
static void stream(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__)
    size_t head = -(uintptr_t)to & (LINE - 1);
    if (head > nbytes) head = nbytes;
    memcpy(to, from, head);
    size_t i = head;
    for (; i + LINE <= nbytes; i += LINE) {
        for (size_t j = 0; j < LINE; j += sizeof(__m128i)) {
            __m128i part = _mm_loadu_si128((const __m128i *)(from + i + j));
            _mm_stream_si128((__m128i *)(to + i + j), part);
        }
    }
    memcpy(to + i, from + i, nbytes - i);
#else
    memcpy(to, from, nbytes);
#endif
}

static inline void fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Which copies go past the cache. Which is fastest depends on where the ranks' cores lie,
 * which may change while a program runs; so each rank tries them now and then, for each
 * size, and takes the one that was fastest. What others see is the same in any case. */
enum { PLAIN, STREAM_PLACES, STREAM_RESULTS, NUM_FORMS = 4, STREAM_FROM = 64 << 10 };
enum { NUM_SIZES = 12, CALLS_BETWEEN_TRIALS = 256 };

typedef struct {
    double seconds[NUM_FORMS];
    unsigned calls;
    int last;
} trials;

static int best_form(const trials *of) {
    int best = 0;
    for (int form = 1; form < NUM_FORMS; form++)
        if (of->seconds[form] < of->seconds[best]) best = form;
    return best;
}

/* Each trial takes two calls: the first pays for where the one before has left the lines,
 * and is not counted. */
static int next_form(trials *of) {
    unsigned turn = of->calls % CALLS_BETWEEN_TRIALS, round = of->calls / CALLS_BETWEEN_TRIALS;
    of->calls++;
    if (!round && turn < 2 * NUM_FORMS) return (int)turn / 2;
    int best = best_form(of);
    return turn < 2 ? (best + 1 + (int)(round % (NUM_FORMS - 1))) % NUM_FORMS : best;
}

static void learn(trials *of, int form, double seconds) {
    double known = of->seconds[form];
    if (form != of->last) {
        of->last = form;
        if (known > 0) return;
    }
    /* One slow call may have other reasons; several show a change. */
    if (known > 0 && seconds > 1.25 * known) seconds = 1.25 * known;
    of->seconds[form] = seconds;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* ---- The segment: records and places -------------------------------------------------- */

typedef struct {
    _Atomic uint64_t tick;
    _Atomic int64_t run;
    _Atomic uint64_t digest, flags;
    uint64_t unused[4];
} record;
_Static_assert(sizeof(record) == LINE, "a record fills a cache line");

typedef struct {
    PyObject_HEAD
    Py_buffer segment;
    record *records;
    char *rings;
    size_t room, ring;
    int rank, size;
    /* Where the next place may begin. */
    size_t next;
    /* What this rank has announced. */
    uint64_t tick, digest, flags;
    int64_t run;
    trials sizes[NUM_SIZES];
} kernel;

/* Return where the next place begins in each ring; see `Places.take`. */
static size_t take(kernel *k, size_t nbytes) {
    size_t start = (k->next + nbytes - 1) / nbytes * nbytes;
    if (start >= k->ring) start = 0;
    k->next = start + nbytes;
    return start;
}

static inline char *at(const kernel *k, int rank, size_t place) {
    return k->rings + (size_t)rank * k->room + place;
}

static void post(kernel *k, int64_t run, uint64_t digest, uint64_t flags) {
    k->tick++;
    k->run = run, k->digest = digest, k->flags = flags;
    record *own = k->records + (k->tick & 1) * (size_t)k->size + k->rank;
    atomic_store_explicit(&own->run, run, memory_order_relaxed);
    atomic_store_explicit(&own->digest, digest, memory_order_relaxed);
    atomic_store_explicit(&own->flags, flags, memory_order_relaxed);
    /* All that was stored before is seen by whoever sees the tick. */
    atomic_store_explicit(&own->tick, k->tick, memory_order_release);
}

/* Say whether all have announced the same: DONE, STEP_AWAITED, or DIFFERS. */
static int look(const kernel *k) {
    record *all = k->records + (k->tick & 1) * (size_t)k->size;
    for (int rank = 0; rank < k->size; rank++)
        if (atomic_load_explicit(&all[rank].tick, memory_order_acquire) != k->tick)
            return STEP_AWAITED;
    for (int rank = 0; rank < k->size; rank++)
        if (atomic_load_explicit(&all[rank].run, memory_order_relaxed) != k->run ||
            atomic_load_explicit(&all[rank].digest, memory_order_relaxed) != k->digest ||
            atomic_load_explicit(&all[rank].flags, memory_order_relaxed) != k->flags)
            return DIFFERS;
    return DONE;
}

static int look_often(const kernel *k, long looks) {
    int found = look(k);
    while (found == STEP_AWAITED && looks-- > 0) {
        RELAX();
        found = look(k);
    }
    return found;
}

static int is_open(const kernel *k) {
    if (!k->segment.obj) PyErr_SetString(PyExc_RuntimeError, "the segment has been closed");
    return k->segment.obj != NULL;
}

/* ---- A sum ---------------------------------------------------------------------------- */

/* How far the arrays have been gone through: which of them comes next, in the order of the
 * types, how many of its elements are done, and how many of its type are left. */
typedef struct {
    int bucket, array;
    size_t done, left;
} cursor;

/* The arrays of one type. */
typedef struct {
    const type *type;
    int first, end;
    size_t elements;
} bucket;

typedef struct {
    PyObject_HEAD
    kernel *kernel;
    int num_arrays, num_buckets, scattered, means;
    size_t nbytes, piece, place_bytes;
    double divisor;
    bucket *buckets;
    /* In the order of the types: which array, and its elements. */
    int *order;
    size_t *counts;
    /* Of a call: what it keeps alive, and where the arrays lie, in the same order. */
    PyObject *arrays, *results;
    const char **sources;
    char **targets;
    cursor laid, added, copied;
    size_t place, after;
    /* Whether own values are read where they are; which copies stream. */
    int near, form, follows;
    enum { IDLE, IN_HEADER, IN_STEP } state;
    double seconds;
    int timed;
} sum;

static cursor start_of(const sum *s) {
    cursor begin = {0, 0, 0, s->num_buckets ? s->buckets[0].elements : 0};
    return begin;
}

/* Take the next elements of one array, `most` at most; return how many. */
static size_t span(const sum *s, cursor *c, size_t most, int *array, size_t *first) {
    while (c->done == s->counts[c->array]) c->array++, c->done = 0;
    size_t count = s->counts[c->array] - c->done;
    if (count > most) count = most;
    *array = c->array, *first = c->done;
    c->done += count, c->left -= count;
    return count;
}

/* Take the next run of a piece, elements of one type: how many; 0 at the end of the piece.
 * `used` is where it begins in the piece, in bytes. As hpcstrat/arrays/packing.py cuts. */
static size_t run_of(const sum *s, cursor *c, size_t *used, const type **of) {
    *used = (*used + LINE - 1) & ~(size_t)(LINE - 1);
    while (c->bucket < s->num_buckets && !c->left) {
        if (++c->bucket == s->num_buckets) break;
        c->array = s->buckets[c->bucket].first, c->done = 0;
        c->left = s->buckets[c->bucket].elements;
    }
    if (c->bucket == s->num_buckets || *used >= s->piece) return 0;
    *of = s->buckets[c->bucket].type;
    size_t room = (s->piece - *used) / (*of)->wide;
    return room < c->left ? room : c->left;
}

/* Copy the next piece of own values into a place. */
static void lay_out(sum *s, size_t place) {
    char *own = at(s->kernel, s->kernel->rank, place);
    size_t used = 0, count, first, size;
    const type *of;
    int array;
    while ((size = run_of(s, &s->laid, &used, &of))) {
        for (; size; size -= count, used += count * of->wide) {
            count = span(s, &s->laid, size, &array, &first);
            const char *from = s->sources[array] + first * of->size;
            if (of->widen)
                of->widen(own + used, from, count);
            else if (!(s->form & STREAM_PLACES))
                memcpy(own + used, from, count * of->size);
            else
                stream(own + used, from, count * of->size);
        }
    }
    if (s->form & STREAM_PLACES) fence();
}

/* Add a span of all ranks' places, `offset` bytes into them, in the order of the ranks. */
static void add_span(const sum *s, const type *of, const char *near, size_t offset,
                     char *out, int straight, size_t count) {
    kernel *k = s->kernel;
    _Alignas(LINE) char total[CHUNK];
    const size_t most = CHUNK / of->wide;
    for (size_t i = 0, part; i < count; i += part, offset += part * of->wide) {
        part = count - i < most ? count - i : most;
        char *into = straight ? out + i * of->wide : total;
        const char *first = at(k, 0, s->place + offset), *second = at(k, 1, s->place + offset);
        /* Own values are nearer where they came from; and a result may lie over them. */
        if (near && k->rank)
            second = near + i * of->wide;
        else if (near)
            first = near + i * of->wide;
        of->add(into, first, second, part);
        for (int rank = 2; rank < k->size; rank++)
            of->add(into, into, at(k, rank, s->place + offset), part);
        if (of->divide) of->divide(into, part, s->divisor);
        if (straight) continue;
        if (of->narrow)
            of->narrow(out + i * of->result, total, part);
        else if (s->form & STREAM_RESULTS)
            stream(out + i * of->wide, total, part * of->wide);
        else
            memcpy(out + i * of->wide, total, part * of->wide);
    }
}

/* Add the next piece of all ranks, straight into the results. */
static void add_piece(sum *s) {
    size_t used = 0, count, first, size;
    const type *of;
    int array;
    while ((size = run_of(s, &s->added, &used, &of))) {
        for (; size; size -= count, used += count * of->wide) {
            count = span(s, &s->added, size, &array, &first);
            const char *near = NULL;
            if (s->near && !of->widen && s->kernel->size == 2)
                near = s->sources[array] + first * of->size;
            int straight = !of->narrow && !(s->form & STREAM_RESULTS);
            add_span(s, of, near, used, s->targets[array] + first * of->result, straight,
                     count);
        }
    }
    if (s->form & STREAM_RESULTS) fence();
}

/* Return where a rank's segment of a run begins, in whole cache lines. */
static size_t segment(const sum *s, const type *of, size_t size, int rank) {
    size_t line = LINE / of->wide, share = line * (size_t)s->kernel->size;
    size_t start = (size + share - 1) / share * line * (size_t)rank;
    return start < size ? start : size;
}

/* Add this rank's segments of the next piece, into its own place. */
static void add_segments(sum *s) {
    int rank = s->kernel->rank, array;
    size_t used = 0, size, first;
    const type *of;
    while ((size = run_of(s, &s->added, &used, &of))) {
        size_t low = segment(s, of, size, rank), high = segment(s, of, size, rank + 1);
        size_t offset = used + low * of->wide;
        char *own = at(s->kernel, rank, s->place + offset);
        type plain = *of;
        plain.narrow = NULL;
        /* Of a chunk all terms are read before the sums are written over one of them. */
        if (low < high) add_span(s, &plain, NULL, offset, own, 0, high - low);
        used += size * of->wide;
        for (size_t left = size; left; left -= span(s, &s->added, left, &array, &first)) {
        }
    }
    if (s->form & STREAM_RESULTS) fence();
}

/* Copy the sums of a piece out of the places of the ranks that have added them. */
static void copy_out(sum *s) {
    size_t used = 0, first, size;
    const type *of;
    int array;
    while ((size = run_of(s, &s->copied, &used, &of))) {
        size_t count;
        for (size_t begin = 0; begin < size; begin += count) {
            count = span(s, &s->copied, size - begin, &array, &first);
            char *out = s->targets[array] + first * of->result;
            for (int rank = 0; rank < s->kernel->size; rank++) {
                size_t low = segment(s, of, size, rank), high = segment(s, of, size, rank + 1);
                if (low < begin) low = begin;
                if (high > begin + count) high = begin + count;
                if (low >= high) continue;
                const char *from = at(s->kernel, rank, s->place + used + low * of->wide);
                char *to = out + (low - begin) * of->result;
                if (of->narrow)
                    of->narrow(to, from, high - low);
                else if (s->form & STREAM_RESULTS)
                    stream(to, from, (high - low) * of->wide);
                else
                    memcpy(to, from, (high - low) * of->wide);
            }
        }
        used += size * of->wide;
    }
    if (s->form & STREAM_RESULTS) fence();
}

/* Whether pieces are left to lay out. */
static int has_more(const sum *s) {
    cursor probe = s->laid;
    const type *of;
    size_t used = 0;
    return run_of(s, &probe, &used, &of) > 0;
}

static trials *trials_of(sum *s) {
    if (s->nbytes < STREAM_FROM) return NULL;
    int size = 0;
    while (size + 1 < NUM_SIZES && s->nbytes >> size >= 2 * STREAM_FROM) size++;
    return s->kernel->sizes + size;
}

/* Lay out the first piece: before the header. */
static void begin(sum *s) {
    s->laid = s->added = s->copied = start_of(s);
    trials *of = trials_of(s);
    s->form = of ? next_form(of) : PLAIN;
    s->timed = of != NULL;
    double start = of ? now() : 0;
    s->place = take(s->kernel, s->place_bytes);
    lay_out(s, s->place);
    if (of) s->seconds = now() - start;
    s->follows = 0;
    s->state = IN_HEADER;
}

/* Do all that can be done after the header: return DONE, or what is waited for. */
static int advance(sum *s, uint64_t digest, long looks) {
    kernel *k = s->kernel;
    double start = 0;
    for (;;) {
        int found = look_often(k, looks);
        if (found == STEP_AWAITED) {
            s->timed = 0;
            return s->state == IN_HEADER ? HEADER_AWAITED : STEP_AWAITED;
        }
        if (found == DIFFERS) return s->state == IN_HEADER ? DIFFERS : STEP_DIFFERS;
        if (s->state == IN_HEADER && s->timed) start = now();
        if (s->state == IN_STEP) {
            if (s->scattered) copy_out(s);
            s->place = s->after;
            if (!s->follows) break;
        }
        s->state = IN_STEP;
        s->follows = has_more(s);
        if (s->follows) {
            s->after = take(k, s->place_bytes);
            lay_out(s, s->after);
        }
        if (s->scattered) {
            add_segments(s);
            post(k, 0, digest ^ k->next, 0);
        } else {
            if (s->follows) post(k, 0, digest ^ k->next, 0);
            add_piece(s);
            if (!s->follows) break;
        }
    }
    s->state = IDLE;
    if (s->timed) learn(trials_of(s), s->form, s->seconds + now() - start);
    return DONE;
}

/* ---- What Python sees ----------------------------------------------------------------- */

/* Find where arrays lie; they are kept by the caller, or by the sum. */
static int find(sum *s, PyObject *arrays, int writes) {
    if (!PyList_Check(arrays) || PyList_Size(arrays) != s->num_arrays) {
        PyErr_Format(PyExc_ValueError, "expected a list of %d arrays", s->num_arrays);
        return -1;
    }
    for (int b = 0; b < s->num_buckets; b++) {
        const type *of = s->buckets[b].type;
        for (int i = s->buckets[b].first; i < s->buckets[b].end; i++) {
            Py_buffer view;
            PyObject *array = PyList_GetItem(arrays, s->order[i]);
            if (PyObject_GetBuffer(array, &view, writes ? PyBUF_WRITABLE : PyBUF_SIMPLE)) {
                PyErr_Clear();
                PyErr_SetString(PyExc_BufferError, "expected arrays in C order");
                return -1;
            }
            size_t size = writes ? of->result : of->size;
            size_t length = (size_t)view.len;
            if (writes)
                s->targets[i] = view.buf;
            else
                s->sources[i] = view.buf;
            PyBuffer_Release(&view);
            size_t part = size < sizeof(double) ? size : sizeof(double);
            if ((uintptr_t)view.buf % part) {
                PyErr_SetString(PyExc_BufferError, "expected aligned arrays");
                return -1;
            }
            if (length != s->counts[i] * size) {
                PyErr_Format(PyExc_ValueError, "expected %zu elements of %zu bytes in array %d",
                             s->counts[i], size, s->order[i]);
                return -1;
            }
        }
    }
    return 0;
}

static void let_go(sum *s) {
    PyObject *arrays = s->arrays, *results = s->results;
    s->arrays = s->results = NULL;
    Py_XDECREF(arrays);
    Py_XDECREF(results);
}

typedef struct {
    uintptr_t begin, end;
} extent;

static int compare_extents(const void *one, const void *other) {
    uintptr_t a = ((const extent *)one)->begin, b = ((const extent *)other)->begin;
    return (a > b) - (a < b);
}

/* Whether each result is the memory of its own array, or lies apart from all others. */
static int lie_apart(const sum *s) {
    size_t n = (size_t)s->num_arrays, found = 0;
    extent *extents = PyMem_Malloc(2 * n * sizeof *extents);
    if (!extents) return 0;
    for (int b = 0; b < s->num_buckets; b++) {
        const type *of = s->buckets[b].type;
        for (int i = s->buckets[b].first; i < s->buckets[b].end; i++) {
            uintptr_t source = (uintptr_t)s->sources[i], target = (uintptr_t)s->targets[i];
            if (!s->counts[i]) continue;
            extents[found++] = (extent){target, target + s->counts[i] * of->result};
            if (source == target && of->size == of->result) continue;
            extents[found++] = (extent){source, source + s->counts[i] * of->size};
        }
    }
    qsort(extents, found, sizeof *extents, compare_extents);
    int apart = 1;
    for (size_t i = 1; i < found; i++) apart &= extents[i - 1].end <= extents[i].begin;
    PyMem_Free(extents);
    return apart;
}

static PyObject *dtype_name, *shape_name;

/* Whether an attribute of an array is, or equals, what is expected. */
static int has(PyObject *array, PyObject *name, PyObject *expected) {
    PyObject *value = PyObject_GetAttr(array, name);
    if (!value) return -1;
    int same = value == expected ? 1 : PyObject_RichCompareBool(value, expected, Py_EQ);
    Py_DECREF(value);
    return same;
}

/* Whether a list holds arrays of a class, with these dtypes and shapes, two by two. */
static int holds(PyObject *arrays, PyObject *class, PyObject *kinds) {
    Py_ssize_t count = PyList_Size(arrays);
    if (PyTuple_Size(kinds) != 2 * count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *array = PyList_GetItem(arrays, i);
        if ((PyObject *)Py_TYPE(array) != class) return 0;
        int same = has(array, dtype_name, PyTuple_GetItem(kinds, 2 * i));
        if (same == 1) same = has(array, shape_name, PyTuple_GetItem(kinds, 2 * i + 1));
        if (same != 1) return same;
    }
    return 1;
}

/* holds(arrays, class, kinds): of a list, see above. */
static PyObject *kernel_holds(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 3 || !PyList_Check(args[0]) || !PyTuple_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "expected a list, a class and a tuple");
    int found = holds(args[0], args[1], args[2]);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

/* start(arrays, results, near): before the header. `near` says that values may be read
 * where they are, as no result lies over another array; 2, that this is to be seen. */
static PyObject *sum_start(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    sum *s = (sum *)self;
    if (count < 3) return PyErr_Format(PyExc_TypeError, "expected 3 arguments");
    if (!is_open(s->kernel)) return NULL;
    if (find(s, args[0], 0) || find(s, args[1], 1)) return NULL;
    long near = PyLong_AsLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (near == 2 && !lie_apart(s)) {
        PyErr_SetString(PyExc_BufferError, "expected results that lie apart");
        return NULL;
    }
    let_go(s);
    s->arrays = Py_NewRef(args[0]), s->results = Py_NewRef(args[1]);
    s->near = near != 0;
    begin(s);
    Py_RETURN_NONE;
}

static PyObject *go_on(sum *s, uint64_t digest, long looks) {
    int found = s->nbytes < UNLOCKED_FROM ? advance(s, digest, looks < 100 ? looks : 100) : 0;
    if (s->state != IDLE && (s->nbytes >= UNLOCKED_FROM || (found && looks > 100))) {
        Py_BEGIN_ALLOW_THREADS
        found = advance(s, digest, looks);
        Py_END_ALLOW_THREADS
    }
    if (found == DONE) let_go(s);
    return PyLong_FromLong(found);
}

/* go_on(digest, looks): after the header. */
static PyObject *sum_go_on(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    sum *s = (sum *)self;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "expected 2 arguments");
    if (s->state == IDLE) return PyErr_Format(PyExc_RuntimeError, "no call is under way");
    uint64_t digest = PyLong_AsUnsignedLongLongMask(args[0]);
    long looks = PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    return go_on(s, digest, looks);
}

/* reduce(arrays, results, near, run, digest, looks): start, the header, and go_on. */
static PyObject *sum_reduce(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    sum *s = (sum *)self;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "expected 6 arguments");
    int64_t run = PyLong_AsLongLong(args[3]);
    uint64_t digest = PyLong_AsUnsignedLongLongMask(args[4]);
    long looks = PyLong_AsLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    PyObject *started = sum_start(self, args, 3);
    if (!started) return NULL;
    Py_DECREF(started);
    post(s->kernel, run, digest ^ s->kernel->next, 0);
    return go_on(s, digest, looks);
}

static void free_sum(sum *s) {
    let_go(s);
    Py_CLEAR(s->kernel);
    PyMem_Free(s->buckets), PyMem_Free(s->order), PyMem_Free(s->counts);
    PyMem_Free(s->sources), PyMem_Free(s->targets);
}

static void sum_dealloc(PyObject *self) {
    PyTypeObject *kind = Py_TYPE(self);
    free_sum((sum *)self);
    ((freefunc)PyType_GetSlot(kind, Py_tp_free))(self);
    Py_DECREF(kind);
}

static size_t power_of_two(size_t nbytes) {
    size_t power = 32 << 10;
    while (power < nbytes) power *= 2;
    return power;
}

/* Sort the arrays by type, in the order in which the types appear. */
static int sort(sum *s, const char *codes, PyObject *counts) {
    int taken = 0;
    for (int code = 0, i = 0; i < s->num_arrays; i++) {
        code = (unsigned char)codes[i];
        int known = 0;
        for (int b = 0; b < s->num_buckets; b++)
            known |= s->buckets[b].type == &TYPES[code][s->means];
        if (known) continue;
        bucket *b = s->buckets + s->num_buckets++;
        b->type = &TYPES[code][s->means];
        b->first = taken, b->elements = 0;
        for (int j = i; j < s->num_arrays; j++) {
            if (codes[j] != codes[i]) continue;
            s->order[taken] = j;
            s->counts[taken] = PyLong_AsSize_t(PyList_GetItem(counts, j));
            if (PyErr_Occurred()) return -1;
            b->elements += s->counts[taken++];
        }
        b->end = taken;
        s->nbytes += b->elements * b->type->wide;
    }
    return 0;
}

static PyObject *kernel_type, *sum_type;

/* Sum(kernel, codes, counts, piece_bytes, divisor, scattered) */
static int sum_init(PyObject *self, PyObject *args, PyObject *names) {
    sum *s = (sum *)self;
    PyObject *owner, *counts;
    const char *codes;
    Py_ssize_t num_arrays, piece;
    if (names && PyDict_Size(names)) {
        PyErr_SetString(PyExc_TypeError, "expected no names of arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O!y#O!ndp", kernel_type, &owner, &codes, &num_arrays, &PyList_Type, &counts,
                          &piece, &s->divisor, &s->scattered))
        return -1;
    kernel *k = (kernel *)owner;
    int good = num_arrays > 0 && num_arrays < INT32_MAX && PyList_Size(counts) == num_arrays;
    for (Py_ssize_t i = 0; good && i < num_arrays; i++) good = (unsigned char)codes[i] < NUM_TYPES;
    size_t slot = k->ring / 4, place = power_of_two((size_t)(piece > 0 ? piece : 0));
    if (place > slot) place = slot;
    if (!good || piece < LINE || piece % LINE || (size_t)piece > slot) {
        PyErr_SetString(PyExc_ValueError, "expected arrays of known types, and pieces that fit");
        return -1;
    }
    size_t n = (size_t)num_arrays;
    s->num_arrays = (int)num_arrays, s->means = s->divisor != 0, s->piece = (size_t)piece;
    s->buckets = PyMem_Calloc(n < NUM_TYPES ? n : NUM_TYPES, sizeof *s->buckets);
    s->order = PyMem_Calloc(n, sizeof *s->order);
    s->counts = PyMem_Calloc(n, sizeof *s->counts);
    s->sources = PyMem_Calloc(n, sizeof *s->sources);
    s->targets = PyMem_Calloc(n, sizeof *s->targets);
    if (!s->buckets || !s->order || !s->counts || !s->sources || !s->targets) {
        PyErr_NoMemory();
        return -1;
    }
    s->kernel = (kernel *)Py_NewRef(owner);
    if (sort(s, codes, counts)) return -1;
    /* Of a single piece no more than it needs; each run may leave a part of a line. */
    size_t used = s->nbytes + LINE * (size_t)s->num_buckets;
    s->place_bytes = power_of_two(used) < place ? power_of_two(used) : place;
    return 0;
}

/* post(run, digest, flags) */
static PyObject *kernel_post(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "expected 3 arguments");
    int64_t run = PyLong_AsLongLong(args[0]);
    uint64_t digest = PyLong_AsUnsignedLongLongMask(args[1]);
    uint64_t flags = PyLong_AsUnsignedLongLongMask(args[2]);
    if (PyErr_Occurred() || !is_open((kernel *)self)) return NULL;
    post((kernel *)self, run, digest, flags);
    Py_RETURN_NONE;
}

static PyObject *kernel_agreed(PyObject *self, PyObject *none) {
    (void)none;
    if (!is_open((kernel *)self)) return NULL;
    return PyBool_FromLong(look((kernel *)self) == DONE);
}

/* Return the ranks that have not announced anything since. */
static PyObject *kernel_missing(PyObject *self, PyObject *none) {
    kernel *k = (kernel *)self;
    (void)none;
    if (!is_open(k)) return NULL;
    PyObject *missing = PyList_New(0);
    record *all = k->records + (k->tick & 1) * (size_t)k->size;
    for (int rank = 0; missing && rank < k->size; rank++) {
        if (atomic_load_explicit(&all[rank].tick, memory_order_acquire) == k->tick) continue;
        PyObject *number = PyLong_FromLong(rank);
        if (!number || PyList_Append(missing, number)) Py_CLEAR(missing);
        Py_XDECREF(number);
    }
    return missing;
}

static PyObject *kernel_take(PyObject *self, PyObject *nbytes) {
    kernel *k = (kernel *)self;
    size_t size = PyLong_AsSize_t(nbytes);
    if (PyErr_Occurred()) return NULL;
    if (!size || 4 * size > k->ring) return PyErr_Format(PyExc_ValueError, "expected a place");
    return PyLong_FromSize_t(take(k, size));
}

static PyObject *kernel_restart(PyObject *self, PyObject *none) {
    (void)none;
    ((kernel *)self)->next = 0;
    Py_RETURN_NONE;
}

static PyObject *kernel_close(PyObject *self, PyObject *none) {
    kernel *k = (kernel *)self;
    (void)none;
    if (k->segment.obj) PyBuffer_Release(&k->segment);
    Py_RETURN_NONE;
}

/* Of each size class: which form is the fastest, and the seconds of all. */
static PyObject *kernel_forms(PyObject *self, PyObject *none) {
    kernel *k = (kernel *)self;
    (void)none;
    PyObject *forms = PyList_New(NUM_SIZES);
    for (int i = 0; forms && i < NUM_SIZES; i++) {
        const double *seconds = k->sizes[i].seconds;
        PyObject *one = Py_BuildValue("idddd", k->sizes[i].calls ? best_form(k->sizes + i) : -1,
                                      seconds[0], seconds[1], seconds[2], seconds[3]);
        if (!one || PyList_SetItem(forms, i, one)) Py_CLEAR(forms);
    }
    return forms;
}

static PyObject *kernel_next(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(((kernel *)self)->next);
}

static void kernel_dealloc(PyObject *self) {
    PyTypeObject *kind = Py_TYPE(self);
    Py_XDECREF(kernel_close(self, NULL));
    ((freefunc)PyType_GetSlot(kind, Py_tp_free))(self);
    Py_DECREF(kind);
}

/* Kernel(segment, common_bytes, room_bytes, ring_bytes, rank, size) */
static int kernel_init(PyObject *self, PyObject *args, PyObject *names) {
    kernel *k = (kernel *)self;
    PyObject *segment;
    Py_ssize_t common, room, ring;
    if (names && PyDict_Size(names)) {
        PyErr_SetString(PyExc_TypeError, "expected no names of arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "Onnnii", &segment, &common, &room, &ring, &k->rank, &k->size))
        return -1;
    if (PyObject_GetBuffer(segment, &k->segment, PyBUF_WRITABLE)) return -1;
    int fits = k->size > 0 && k->rank >= 0 && k->rank < k->size && ring > 0 && ring <= room &&
               common >= 2 * k->size * LINE && k->segment.len >= common + k->size * room &&
               (uintptr_t)k->segment.buf % LINE == 0 && common % LINE == 0 && room % LINE == 0;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "expected a segment that holds records and rings");
        return -1;
    }
    k->records = k->segment.buf;
    k->rings = (char *)k->segment.buf + common;
    k->room = (size_t)room, k->ring = (size_t)ring;
    return 0;
}

#define FAST(function) ((PyCFunction)(void (*)(void))function)

static PyMethodDef kernel_methods[] = {
    {"post", FAST(kernel_post), METH_FASTCALL, NULL},
    {"agreed", kernel_agreed, METH_NOARGS, NULL},
    {"missing", kernel_missing, METH_NOARGS, NULL},
    {"take", kernel_take, METH_O, NULL},
    {"restart", kernel_restart, METH_NOARGS, NULL},
    {"forms", kernel_forms, METH_NOARGS, NULL},
    {"close", kernel_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef kernel_attributes[] = {
    {"next", kernel_next, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot kernel_slots[] = {
    {Py_tp_methods, kernel_methods}, {Py_tp_getset, kernel_attributes},
    {Py_tp_init, kernel_init},       {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_new, PyType_GenericNew},  {0, NULL},
};
static PyType_Spec kernel_spec = {"hpcstrat.native.kernel.Kernel", sizeof(kernel), 0,
                                  Py_TPFLAGS_DEFAULT, kernel_slots};

static PyMethodDef sum_methods[] = {
    {"start", FAST(sum_start), METH_FASTCALL, NULL},
    {"go_on", FAST(sum_go_on), METH_FASTCALL, NULL},
    {"reduce", FAST(sum_reduce), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot sum_slots[] = {
    {Py_tp_methods, sum_methods},   {Py_tp_init, sum_init}, {Py_tp_dealloc, sum_dealloc},
    {Py_tp_new, PyType_GenericNew}, {0, NULL},
};
static PyType_Spec sum_spec = {"hpcstrat.native.kernel.Sum", sizeof(sum), 0, Py_TPFLAGS_DEFAULT,
                               sum_slots};

static PyMethodDef functions[] = {
    {"holds", FAST(kernel_holds), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "kernel", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernel(void) {
    PyObject *made = PyModule_Create(&module);
    kernel_type = PyType_FromSpec(&kernel_spec);
    sum_type = PyType_FromSpec(&sum_spec);
    dtype_name = PyUnicode_InternFromString("dtype");
    shape_name = PyUnicode_InternFromString("shape");
    int good = made && dtype_name && shape_name && kernel_type && sum_type &&
               !PyModule_AddObjectRef(made, "Kernel", kernel_type) &&
               !PyModule_AddObjectRef(made, "Sum", sum_type) &&
               !PyModule_AddIntConstant(made, "VERSION", KERNEL_VERSION);
    if (!good) Py_CLEAR(made);
    return made;
}
