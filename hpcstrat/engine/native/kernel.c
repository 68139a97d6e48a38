/* Sums over the ranks of one worker, through memory that they share.
 *
 * A `Kernel` refers to the shared segment: two records per rank, used in turn, and after the
 * records a ring for each rank. A `Sum` makes calls of one kind: it copies this rank's values into
 * the ring, posts the header, adds the values of all ranks in rank order, and writes the results,
 * piece by piece. The next piece is copied into the ring while the present piece is added. MAX and
 * MIN are made in the same way: only the functions of a type in elements.h differ.
 *
 * Every wait in this file is bounded. If a record is still missing, the call returns a code. Python
 * code then waits for it in a loop that handles signals and notices dead processes, and calls
 * `go_on`. hpcstrat/engine/channel/shared_rings.py and hpcstrat/engine/channel/headers.py describe
 * the places and the records.
 *
 * For workers of one replica, a `Kernel` has private memory instead of a segment, with a record and
 * a place for each worker, see hpcstrat/engine/channel/worker_values.py. This file calls MPI only
 * by Python objects that `sum_keep` stores.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined __linux__ && defined __LP64__
#define HAS_FUTEX
#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#include "elements.h"

enum { DONE, HEADER_AWAITED, STEP_AWAITED, DIFFERS, STEP_DIFFERS, HEADER_SENT, NOT_READ };
enum { CHUNK = 8 << 10, UNLOCKED_FROM = 16 << 10, ADDRESSES_BYTES = 32 << 10 };
enum { PART = 16 << 10, FEW_BLOCKS = 8 };

/* ---- Copies --------------------------------------------------------------------------- */

/* Forms of a call: whether copies into places, and copies of results, bypass the cache. The fastest
 * form depends on the cores of the ranks, which may change. So each rank tries all forms, repeats
 * these trials from time to time, and uses the fastest form. All forms write the same values.
 * DIRECT is a form of all ranks together, see `wants_direct`: they read each other's arrays. */
enum { PLAIN, STREAM_PLACES, STREAM_RESULTS, DIRECT = 4, NUM_FORMS = 4, STREAM_FROM = 64 << 10 };
enum { BETWEEN_TRIALS = 32, ODD_CALLS = 6, MOST_PATIENCE = 6, LONG_FROM = 8 << 20 };

typedef struct {
    double seconds[NUM_FORMS + 1];
    /* Number of calls; of successive calls with an unusual time; of requests for new trials. */
    unsigned calls, odd, patience;
    /* The fastest form, and the form of the last call. */
    int best, last;
} trials;

/* Return the number of calls that try all forms at first. A trial of a form takes two calls,
 * because the time of the first depends on where the previous form left the cache lines. In a
 * `lengthy` call this effect is small, and one call is enough. Short calls try each form twice. */
static unsigned first_trials(int lengthy) { return lengthy ? NUM_FORMS : 4 * NUM_FORMS; }

/* Return the fastest form of this rank. Results that bypass the cache cost the program the time to
 * read them from memory, so that these forms must be a twentieth faster. */
static int fastest(const trials *of) {
    int best = 0;
    double least = of->seconds[0];
    for (int form = 1; form < NUM_FORMS; form++) {
        double seconds = of->seconds[form] * (form & STREAM_RESULTS ? 1.05 : 1);
        if (seconds < least) best = form, least = seconds;
    }
    return best;
}

static int next_form(trials *of, int lengthy) {
    unsigned turn = of->calls % BETWEEN_TRIALS, round = of->calls / BETWEEN_TRIALS;
    unsigned each = lengthy ? 1 : 2;
    int best = of->best = fastest(of);
    if (of->calls++ < first_trials(lengthy)) return (int)(turn / each) % NUM_FORMS;
    int other = (best + 1 + (int)(round % (NUM_FORMS - 1))) % NUM_FORMS;
    /* Forms that were much slower are seldom tried again. */
    int tried = of->seconds[other] < 2 * of->seconds[best] || round % 16 < NUM_FORMS;
    return tried && round && turn < each ? other : best;
}

/* Record the time of a call; return whether the times have changed permanently. */
static int learn(trials *of, int form, double seconds, int lengthy) {
    double *known = of->seconds + form;
    int counts = form == of->last || lengthy, begins = of->calls <= first_trials(lengthy);
    of->last = form;
    if (*known == 0 || (begins && seconds < *known)) *known = seconds;
    if (!counts || begins) return 0;
    /* One long time may have other causes. */
    double limited = seconds < 1.5 * *known ? seconds : 1.5 * *known;
    if (form != of->best) {
        /* The form was last tried long ago, perhaps on other cores. */
        *known = limited;
        return 0;
    }
    /* Several unusual times in a row show a change. */
    int odd = seconds > 1.2 * *known || seconds < *known / 1.2;
    of->odd = odd ? of->odd + 1 : 0;
    *known += (limited - *known) / (odd ? 16 : 8);
    if (of->odd < ODD_CALLS || of->calls <= (unsigned)BETWEEN_TRIALS << of->patience) return 0;
    of->patience += of->patience < MOST_PATIENCE;
    return 1;
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
    /* Number of rounds of trials that this rank requests; not compared between ranks. */
    _Atomic uint64_t trials;
    /* 1 while this rank sleeps until all ranks' records have this tick, see `sleep_for_records`. */
    _Atomic uint32_t asleep;
    /* For a call in which ranks may read each other's arrays: ADDRESSED, if this rank's place has the
     * addresses of its arrays, and WISHED, if rank 0 wishes the next such call to be direct. */
    _Atomic uint32_t ways;
    char unused[16];
} record;
_Static_assert(sizeof(record) == LINE, "a record fills a cache line");

typedef struct sum sum;
enum { ADDRESSED = 1, WISHED = 2 };
enum { NUM_SLOTS = 64, TOKEN_BYTES = 16 };

typedef struct {
    PyObject_HEAD
    /* Members that Python reads and writes, see hpcstrat/engine/channel/call_state.py. */
    char attention, yields;
    int looks;
    long long run_fingerprint, num_calls;
    unsigned long thread;
    PyObject *what, *last_call;
    size_t next;
    /* The values of this rank's last header or step. */
    uint64_t tick, digest, flags;
    int64_t run;
    record *records;
    char *rings;
    /* Bytes from one rank's ring to the next, of a ring, and of its largest place. */
    size_t room, ring, slot;
    int rank, size;
    /* Number of rounds of trials so far, equal on all ranks, and the number this rank requests. */
    uint64_t num_trials, wanted_trials;
    /* The value of `ways` for the next record. */
    uint32_t ways;
    Py_buffer segment;
    /* Hash table of the sums for `repeat`, by the shape of an array, or the number of arrays. */
    sum *repeated[NUM_SLOTS];
    /* The process IDs of all ranks, for `read_memory`; bytes by which other ranks test it. */
    long *processes;
    char token[TOKEN_BYTES];
} kernel;

/* If `*word` is 1, sleep until `futex_wake` is called for it, until a signal arrives, or for at most
 * `seconds`. */
static void futex_wait(_Atomic uint32_t *word, double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
#ifdef HAS_FUTEX
    if (!syscall(SYS_futex, word, FUTEX_WAIT, 1, &time, NULL, 0) || errno == EAGAIN ||
        errno == EINTR || errno == ETIMEDOUT)
        return;
#endif
    /* There are no futexes, or none in memory of this kind. */
    nanosleep(&time, NULL);
}

static void futex_wake(_Atomic uint32_t *word) {
    atomic_store_explicit(word, 0, memory_order_relaxed);
#ifdef HAS_FUTEX
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
#endif
}

/* Read the memory of another rank's process into `count` chunks of `chunk` bytes, which begin at
 * multiples of `stride`; return whether this succeeded. The kernel of the operating system copies
 * the bytes once, see process_vm_readv(2) in the Linux manual pages. */
static int read_memory(long process, uint64_t address, char *to, size_t chunk, size_t count,
                       size_t stride) {
#ifdef HAS_FUTEX
    enum { MOST_CHUNKS = 64, MOST_BYTES = 64 << 20 };
    for (size_t done = 0, within = 0; done < count;) {
        struct iovec local[MOST_CHUNKS];
        size_t n = 0, nbytes = 0;
        while (n < MOST_CHUNKS && done < count && nbytes < MOST_BYTES) {
            size_t size = chunk - within < MOST_BYTES - nbytes ? chunk - within : MOST_BYTES - nbytes;
            local[n++] = (struct iovec){to + done * stride + within, size};
            nbytes += size, within += size;
            if (within == chunk) done++, within = 0;
        }
        struct iovec remote = {(void *)(uintptr_t)address, nbytes};
        long found = syscall(SYS_process_vm_readv, process, local, n, &remote, 1, 0);
        if (found < 0 || (size_t)found != nbytes) return 0;
        address += nbytes;
    }
    return 1;
#else
    (void)process, (void)address, (void)to, (void)chunk, (void)count, (void)stride;
    return 0;
#endif
}

static void post(kernel *k, int64_t run, uint64_t digest, uint64_t flags) {
    k->tick++;
    k->run = run, k->digest = digest, k->flags = flags;
    record *own = k->records + (k->tick & 1) * (size_t)k->size + k->rank;
    atomic_store_explicit(&own->run, run, memory_order_relaxed);
    atomic_store_explicit(&own->digest, digest, memory_order_relaxed);
    atomic_store_explicit(&own->flags, flags, memory_order_relaxed);
    atomic_store_explicit(&own->trials, k->wanted_trials, memory_order_relaxed);
    atomic_store_explicit(&own->ways, k->ways, memory_order_relaxed);
    /* A rank that reads this tick sees all earlier stores of this rank. */
    atomic_store_explicit(&own->tick, k->tick, memory_order_release);
}

/* Wake the ranks that sleep until all records have arrived, if no record is missing now. */
static void wake_if_complete(const kernel *k) {
    record *all = k->records + (k->tick & 1) * (size_t)k->size;
    uint32_t asleep = 0;
    for (int rank = 0; rank < k->size; rank++)
        asleep |= atomic_load_explicit(&all[rank].asleep, memory_order_relaxed);
    if (!asleep) return;
    for (int rank = 0; rank < k->size; rank++)
        if (atomic_load_explicit(&all[rank].tick, memory_order_relaxed) != k->tick) return;
    for (int rank = 0; rank < k->size; rank++)
        if (atomic_load_explicit(&all[rank].asleep, memory_order_relaxed))
            futex_wake(&all[rank].asleep);
}

/* Wake sleeping ranks after this rank has posted a record. All ranks execute this fence, or the
 * fence of `sleep_for_records`, one after the other. So either this rank sees that another rank
 * sleeps, or the other rank sees this rank's record before it sleeps. And if ranks post at the same
 * time, one of them sees all records. */
static void wake(const kernel *k) {
    atomic_thread_fence(memory_order_seq_cst);
    wake_if_complete(k);
}

/* Compare all ranks' records with this rank's: return DONE if they are equal, STEP_AWAITED if some
 * are missing, or DIFFERS if they differ. */
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

/* Let all workers have this worker's present record; only in private memory. */
static void arrive(kernel *k) {
    record *all = k->records + (k->tick & 1) * (size_t)k->size;
    for (int rank = 0; rank < k->size; rank++)
        if (rank != k->rank) memcpy(all + rank, all + k->rank, sizeof *all);
}

/* Return whether a call may begin: `attention` is not set, and no other thread is in a call. */
static int is_free(const kernel *k) {
    return !k->attention && (!k->thread || k->thread == PyThread_get_thread_ident());
}

/* Begin a new round of trials if any rank requests it, after ranks have moved to other cores. */
static void agree_on_trials(kernel *k) {
    record *all = k->records + (k->tick & 1) * (size_t)k->size;
    uint64_t most = 0;
    for (int rank = 0; rank < k->size; rank++) {
        uint64_t wanted = atomic_load_explicit(&all[rank].trials, memory_order_relaxed);
        most = wanted > most ? wanted : most;
    }
    k->num_trials = k->wanted_trials = most;
}

/* Sleep until the last of all ranks' records has arrived, but at most for `seconds`. If no rank
 * wakes this rank, the sleep only takes longer. */
static void sleep_for_records(const kernel *k, double seconds) {
    record *own = k->records + (k->tick & 1) * (size_t)k->size + k->rank;
    atomic_store_explicit(&own->asleep, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (look(k) == STEP_AWAITED) futex_wait(&own->asleep, seconds);
    atomic_store_explicit(&own->asleep, 0, memory_order_relaxed);
}

static int look_often(const kernel *k, long looks) {
    int found = look(k);
    while (found == STEP_AWAITED && looks-- > 0) {
        /* The awaited rank may need this core. */
        if (k->yields)
            sched_yield();
        else
            RELAX();
        found = look(k);
    }
    /* A fence would take 0.1 us of a call of 2 us. Without it, a rank that begins to sleep just now
     * may not be woken, and sleeps for its whole time. */
    if (found == STEP_AWAITED)
        wake(k);
    else
        wake_if_complete(k);
    return found;
}

static int is_open(const kernel *k) {
    if (!k->segment.obj) PyErr_SetString(PyExc_RuntimeError, "the segment has been closed");
    return k->segment.obj != NULL;
}

/* ---- A sum ---------------------------------------------------------------------------- */

/* A position in the arrays, in the order of their types: the next array, how many of its elements
 * are done, and how many elements of its type are left. */
typedef struct {
    int bucket, array;
    size_t done, left;
} cursor;

/* An array of a call: its index, its number of elements, its memory, and its result's memory. */
typedef struct {
    int array;
    size_t count;
    const char *source;
    char *target;
    /* Only for a call that moves data: the bytes of its result `array`; `count` has those of its
     * source. */
    size_t written;
} entry;

/* Bytes of an array that a call moves: `count` chunks of `chunk` bytes, which begin at multiples of
 * `stride` from `at` on. In a rank's stream the chunks follow each other from `offset` on. */
typedef struct {
    int rank, array;
    size_t offset, at, chunk, count, stride;
} block;

/* The arrays of one type. */
typedef struct {
    const type *type;
    int first, end;
    size_t elements;
} bucket;

enum { OWNER, WHAT, NAMES, WAIT, LEAVE, EXCHANGE, NUM_KEPT };

struct sum {
    PyObject_HEAD
    kernel *kernel;
    int num_arrays, num_results, num_buckets, scattered;
    uint64_t digest;
    /* Objects for `repeat`, see `sum_keep`; the next sum in the same slot. */
    PyObject *kept[NUM_KEPT];
    sum *following, **slot;
    int listed, continues;
    size_t nbytes, piece, place_bytes;
    double divisor;
    bucket *buckets;
    /* The arrays, in the order of the types. */
    entry *entries;
    /* Lists of arrays without memory of their own, with the shapes and dtypes of a call's arrays,
     * and of their results. */
    PyObject *likes, *result_likes;
    /* The Call object; the function that allocates large results, or None. */
    PyObject *call, *allocate;
    /* How often `find` has read arrays; the objects that a call under way keeps alive. */
    unsigned number;
    PyObject *arrays, *results;
    cursor laid, added, copied;
    /* For a call that moves data, see `Move`: this rank's blocks in its stream, the blocks that it
     * takes from the ranks' streams, the index of the source and of the result of the values that
     * it takes from itself (or -1), and the bytes of the streams put and taken so far. */
    block *puts, *takes;
    int num_puts, num_takes, own_source, own_result, own_taken;
    size_t put, taken;
    /* The blocks that this rank copies itself: block i of `from`, of a source, to block i of `to`,
     * of a result. It fills the other blocks of `to` with zeros. `kept_bytes`: the bytes of `to`. */
    block *from, *to;
    int num_from, num_to;
    size_t kept_bytes;
    /* For a call that combines parts, see `Scatter`: the type of the parts, and the number of
     * elements of the longest part. `put`, `taken` and `piece` then count elements. */
    const type *of;
    size_t longest;
    /* Whether ranks read each other's arrays in some calls, or in all calls, instead of copying them
     * into places; whether they do in this call, and probably in the next. */
    enum { NEVER, SOMETIMES, ALWAYS } reads;
    int direct, next_direct;
    /* Rank 0's place of this piece, and of the next; the places of the other ranks follow at
     * multiples of `stride`. */
    char *place, *after;
    /* The first place of this call, and how many places it has taken. */
    char *first;
    size_t stride, turn;
    /* `near`: own values are read from the source array, not from the place; `form`: the copies
     * that bypass the cache; `follows`: there is a next piece; `results_are`: where the call writes
     * its results, over the sources, into arrays of the caller, or into new arrays. */
    int near, form, follows;
    enum { IN_PLACE, GIVEN, NEW, NUM_KINDS } results_are;
    /* Trials of the calls that write their results to the same kind of memory: new arrays are seldom
     * in the cache. `lap`: the number of bytes summed in the present lap, see `begin_lap`. */
    trials kinds[NUM_KINDS];
    uint64_t num_trials;
    enum { IDLE, IN_HEADER, IN_PLACES, IN_STEP } state;
    double seconds;
    int timed;
    size_t lap;
};

/* Take the next place, and return its address for rank 0: see `SharedRings.take`. If four places
 * fit into one of the largest size, the pieces of a call use the same four in turn, which stay in
 * the cache of the core. */
static char *take(sum *s) {
    kernel *k = s->kernel;
    enum { PLACES = 4 };
    int stays = (s->of ? s->longest : s->nbytes) > s->piece && PLACES * s->place_bytes <= k->slot;
    size_t size = stays ? PLACES * s->place_bytes : s->place_bytes, turn = s->turn++ % PLACES;
    if (stays && s->turn > 1) return s->first + turn * s->place_bytes;
    size_t start = (k->next + size - 1) / size * size;
    if (start >= k->ring) start = 0;
    k->next = start + size;
    return s->first = k->rings + start;
}

static inline char *at(const sum *s, int rank, const char *place) {
    return (char *)place + (size_t)rank * s->stride;
}

static cursor start_of(const sum *s) {
    cursor begin = {0, 0, 0, s->num_buckets ? s->buckets[0].elements : 0};
    return begin;
}

/* Advance the cursor over at most `most` elements of one array; return their number. */
static size_t span(const sum *s, cursor *c, size_t most, int *array, size_t *first) {
    while (c->done == s->entries[c->array].count) c->array++, c->done = 0;
    size_t count = s->entries[c->array].count - c->done;
    if (count > most) count = most;
    *array = c->array, *first = c->done;
    c->done += count, c->left -= count;
    return count;
}

/* Return the number of elements of the next run of a piece, all of one type; 0 at the end of the
 * piece. `used` is the offset in bytes at which the run begins in the piece. The runs are the same
 * as in hpcstrat/engine/arrays/packing.py. */
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

static void put_blocks(sum *s, char *place);
static void put_parts(sum *s, char *place);
static void put_addresses(sum *s, char *place);

/* Copy the next piece of this rank's values into its place. */
static void lay_out(sum *s, char *place) {
    if (s->direct) {
        put_addresses(s, place);
        return;
    }
    if (s->of) {
        put_parts(s, place);
        return;
    }
    if (s->takes) {
        put_blocks(s, place);
        return;
    }
    char *own = at(s, s->kernel->rank, place);
    size_t used = 0, count, first, size;
    const type *of;
    int array;
    while ((size = run_of(s, &s->laid, &used, &of))) {
        for (; size; size -= count, used += count * of->wide) {
            count = span(s, &s->laid, size, &array, &first);
            const char *from = s->entries[array].source + first * of->size;
            if (of->widen)
                of->widen(own + used, from, count);
            else
                copy(own + used, from, count * of->size, s->form & STREAM_PLACES);
        }
    }
    if (s->form & STREAM_PLACES) FENCE();
}

/* Add a span of elements over all ranks' places, in rank order. The span begins `offset` bytes into
 * each place. `straight`: the sums are written directly to `out`. */
static void add_span(const sum *s, const type *of, const char *near, size_t offset, char *out,
                     int straight, size_t count) {
    kernel *k = s->kernel;
    _Alignas(LINE) char total[CHUNK];
    const size_t most = CHUNK / of->wide;
    for (size_t i = 0, part; i < count; i += part, offset += part * of->wide) {
        part = count - i < most ? count - i : most;
        char *into = straight ? out + i * of->wide : total;
        const char *first = s->place + offset, *second = at(s, 1, first);
        /* Read this rank's values from their source, which is more likely in this core's cache. The
         * result may overwrite the source. */
        if (near && k->rank)
            second = near + i * of->wide;
        else if (near)
            first = near + i * of->wide;
        of->combine(into, first, second, part);
        for (int rank = 2; rank < k->size; rank++)
            of->combine(into, into, at(s, rank, s->place + offset), part);
        if (s->divisor > 0) of->divide(into, part, s->divisor);
        if (straight) continue;
        if (of->narrow)
            of->narrow(out + i * of->result, total, part);
        else
            copy(out + i * of->wide, total, part * of->wide, s->form & STREAM_RESULTS);
    }
}

/* Add the next piece over all ranks, directly into the results. */
static void add_piece(sum *s) {
    size_t used = 0, count, first, size;
    const type *of;
    int array;
    while ((size = run_of(s, &s->added, &used, &of))) {
        for (; size; size -= count, used += count * of->wide) {
            count = span(s, &s->added, size, &array, &first);
            const char *near = NULL;
            if (s->near && !of->widen && s->kernel->size == 2)
                near = s->entries[array].source + first * of->size;
            int straight = !of->narrow && !(s->form & STREAM_RESULTS);
            add_span(s, of, near, used, s->entries[array].target + first * of->result, straight,
                     count);
        }
    }
    if (s->form & STREAM_RESULTS) FENCE();
}

/* Return the first element of a rank's segment of a run; segments are whole cache lines. */
static size_t segment(const sum *s, const type *of, size_t size, int rank) {
    size_t line = LINE / of->wide, share = line * (size_t)s->kernel->size;
    size_t start = (size + share - 1) / share * line * (size_t)rank;
    return start < size ? start : size;
}

/* Add this rank's segment of each run of the next piece, into its own place. */
static void add_segments(sum *s) {
    int rank = s->kernel->rank, array;
    size_t used = 0, size, first;
    const type *of;
    while ((size = run_of(s, &s->added, &used, &of))) {
        size_t low = segment(s, of, size, rank), high = segment(s, of, size, rank + 1);
        size_t offset = used + low * of->wide;
        char *own = at(s, rank, s->place + offset);
        type plain = *of;
        plain.narrow = NULL;
        /* The sums may overwrite this rank's values: `add_span` reads all terms of a chunk before
         * it writes the sums of this chunk. */
        if (low < high) add_span(s, &plain, NULL, offset, own, 0, high - low);
        used += size * of->wide;
        for (size_t left = size; left; left -= span(s, &s->added, left, &array, &first)) {
        }
    }
    if (s->form & STREAM_RESULTS) FENCE();
}

/* Copy the sums of a piece into the results, each segment from the place of its rank. */
static void copy_out(sum *s) {
    size_t used = 0, first, size;
    const type *of;
    int array;
    while ((size = run_of(s, &s->copied, &used, &of))) {
        size_t count;
        for (size_t begin = 0; begin < size; begin += count) {
            count = span(s, &s->copied, size - begin, &array, &first);
            char *out = s->entries[array].target + first * of->result;
            for (int rank = 0; rank < s->kernel->size; rank++) {
                size_t low = segment(s, of, size, rank), high = segment(s, of, size, rank + 1);
                if (low < begin) low = begin;
                if (high > begin + count) high = begin + count;
                if (low >= high) continue;
                const char *from = at(s, rank, s->place + used + low * of->wide);
                char *to = out + (low - begin) * of->result;
                if (of->narrow)
                    of->narrow(to, from, high - low);
                else
                    copy(to, from, (high - low) * of->wide, s->form & STREAM_RESULTS);
            }
        }
        used += size * of->wide;
    }
    if (s->form & STREAM_RESULTS) FENCE();
}

/* Copy the bytes of a block between its array and a part of the stream in a place; the part has
 * `size` bytes, and begins at byte `start` of the stream. */
static void copy_block(const sum *s, const block *b, char *array, char *place, size_t start,
                       size_t size, int takes) {
    size_t low = b->offset > start ? b->offset : start, high = b->offset + b->chunk * b->count;
    if (high > start + size) high = start + size;
    if (low >= high) return;
    size_t behind = low - b->offset, within = behind % b->chunk;
    char *begin = array + b->at + behind / b->chunk * b->stride;
    while (low < high) {
        size_t count = b->chunk - within < high - low ? b->chunk - within : high - low;
        char *in_array = begin + within, *in_place = place + low - start;
        char *to = takes ? in_array : in_place, *from = takes ? in_place : in_array;
        if (count >= CHUNK)
            copy(to, from, count, s->form & (takes ? STREAM_RESULTS : STREAM_PLACES));
        else if (count == 8)
            memcpy(to, from, 8);
        else
            memcpy(to, from, count);
        low += count, begin += b->stride, within = 0;
    }
}

/* Copy the blocks that this rank has itself, and fill blocks of its results with zeros. */
static void keep_blocks(const sum *s) {
    for (int i = 0; i < s->num_to; i++) {
        const block *b = s->to + i, *own = i < s->num_from ? s->from + i : NULL;
        char *to = s->entries[b->array].target + b->at;
        const char *from = own ? s->entries[own->array].source + own->at : NULL;
        /* Bytes that are left of the present chunks, and in all. */
        size_t room = b->chunk, left = own ? own->chunk : b->chunk, rest = b->chunk * b->count;
        while (rest) {
            size_t count = room < left ? room : left;
            if (!from)
                memset(to, 0, count);
            else if (count >= CHUNK)
                copy(to, from, count, s->form & STREAM_RESULTS);
            else if (count == 8)
                memcpy(to, from, 8);
            else
                memcpy(to, from, count);
            rest -= count, room -= count, left -= count;
            to += count, from += from ? count : 0;
            if (!rest) break;
            if (!room) to += b->stride - b->chunk, room = b->chunk;
            if (!left && own) from += own->stride - own->chunk;
            if (!left) left = own ? own->chunk : b->chunk;
        }
    }
}

/* Return whether the values that this rank takes from itself are in its result already. */
static int are_here(const sum *s) {
    return s->own_source >= 0 &&
           s->entries[s->own_source].source == s->entries[s->own_result].target;
}

/* Copy the blocks that this rank takes from a rank, in a part of the present piece. */
static void take_from(const sum *s, int rank, char *place, size_t start, size_t size) {
    for (int i = 0; i < s->num_takes; i++) {
        const block *b = s->takes + i;
        if (b->rank == rank) copy_block(s, b, s->entries[b->array].target, place, start, size, 1);
    }
}

/* Copy the next piece of this rank's stream into its place. After the header, copy the values that
 * this rank takes from itself, too, while they are in the cache. */
static void put_blocks(sum *s, char *place) {
    char *own = at(s, s->kernel->rank, place);
    int keeps = s->put && s->own_taken && !are_here(s);
    size_t step = keeps && s->num_puts <= FEW_BLOCKS ? PART : s->piece;
    for (size_t done = 0; done < s->piece && s->put < s->nbytes; done += step) {
        size_t size = step < s->piece - done ? step : s->piece - done;
        for (int i = 0; i < s->num_puts; i++) {
            const block *b = s->puts + i;
            char *array = (char *)s->entries[b->array].source;
            copy_block(s, b, array, own + done, s->put, size, 0);
        }
        if (keeps) take_from(s, s->kernel->rank, own + done, s->put, size);
        s->put += size;
    }
    if (s->form) FENCE();
}

/* Copy the next piece of all ranks' streams from their places into the results. */
static void take_blocks(sum *s) {
    int here = are_here(s);
    for (int i = 0; i < s->num_takes; i++) {
        const block *b = s->takes + i;
        if (b->rank == s->kernel->rank && (here || s->taken)) continue;
        char *array = s->entries[b->array].target;
        copy_block(s, b, array, at(s, b->rank, s->place), s->taken, s->piece, 1);
    }
    /* What a rank sends only to itself is not in its stream. */
    if (!s->taken && s->own_source >= 0 && !s->own_taken && !here)
        copy(s->entries[s->own_result].target, s->entries[s->own_source].source,
             s->entries[s->own_source].count, s->form & STREAM_RESULTS);
    if (!s->taken) keep_blocks(s);
    s->taken += s->piece;
    if (s->form & STREAM_RESULTS) FENCE();
}

/* In a place for a call of ranks that read each other's arrays. */
typedef struct {
    uint64_t offset, address;
} source;

/* Write the addresses of this rank's blocks into its place. */
static void put_addresses(sum *s, char *place) {
    source *own = (source *)at(s, s->kernel->rank, place);
    for (int i = 0; i < s->num_puts; i++) {
        const block *b = s->puts + i;
        own[i] = (source){b->offset, (uintptr_t)(s->entries[b->array].source + b->at)};
    }
    own[s->num_puts] = (source){UINT64_MAX, 0};
}

/* Copy all blocks from the arrays of their ranks; return whether this succeeded. */
static int read_blocks(sum *s) {
    kernel *k = s->kernel;
    int here = are_here(s);
    if (s->own_source >= 0 && !s->own_taken && !here)
        copy(s->entries[s->own_result].target, s->entries[s->own_source].source,
             s->entries[s->own_source].count, 0);
    keep_blocks(s);
    /* A call without values has no place. */
    if (!s->nbytes) return 1;
    for (int shift = 0; shift < k->size; shift++) {
        /* Begin with the own values, then read from all ranks at the same time. */
        int rank = (k->rank + shift) % k->size;
        const source *of = (const source *)at(s, rank, s->place);
        for (int i = 0; i < s->num_takes; i++) {
            const block *b = s->takes + i;
            if (b->rank != rank || (rank == k->rank && here)) continue;
            int j = 0;
            while (of[j].offset != b->offset && of[j].offset != UINT64_MAX) j++;
            if (of[j].offset == UINT64_MAX) return 0;
            char *to = s->entries[b->array].target + b->at;
            if (rank != k->rank) {
                if (!read_memory(k->processes[rank], of[j].address, to, b->chunk, b->count,
                                 b->stride))
                    return 0;
                continue;
            }
            const char *from = (const char *)(uintptr_t)of[j].address;
            for (size_t n = 0; n < b->count; n++)
                copy(to + n * b->stride, from + n * b->chunk, b->chunk, 0);
        }
    }
    return 1;
}

/* Copy the next piece of the parts for all other ranks into this rank's place: first the part for
 * the next rank. */
static void put_parts(sum *s, char *place) {
    int rank = s->kernel->rank, size = s->kernel->size;
    size_t each = s->piece * s->of->size;
    char *own = at(s, rank, place);
    for (int shift = 1; shift < size; shift++, own += each) {
        const entry *part = s->entries + (rank + shift) % size;
        if (part->count <= s->put) continue;
        size_t count = part->count - s->put < s->piece ? part->count - s->put : s->piece;
        copy(own, part->source + s->put * s->of->size, count * s->of->size,
             s->form & STREAM_PLACES);
    }
    s->put += s->piece;
    if (s->form & STREAM_PLACES) FENCE();
}

/* Add the next piece of this rank's part over all ranks, in rank order. */
static void add_parts(sum *s) {
    const type *of = s->of;
    int me = s->kernel->rank, size = s->kernel->size;
    _Alignas(LINE) char total[CHUNK], widened[CHUNK];
    const entry *part = s->entries + me;
    size_t end = s->taken + s->piece < part->count ? s->taken + s->piece : part->count;
    const size_t most = CHUNK / of->wide;
    for (size_t i = s->taken, count; i < end; i += count) {
        count = end - i < most ? end - i : most;
        const char *first = NULL;
        for (int rank = 0; rank < size; rank++) {
            const char *term = part->source + i * of->size;
            if (rank != me)
                term = at(s, rank, s->place) + (i - s->taken) * of->size +
                       (size_t)((me - rank + size) % size - 1) * s->piece * of->size;
            if (of->widen) {
                of->widen(rank ? widened : total, term, count);
                term = rank ? widened : total;
            }
            if (rank)
                of->combine(total, first, term, count);
            first = rank ? total : term;
        }
        if (s->divisor > 0) of->divide(total, count, s->divisor);
        if (of->narrow)
            of->narrow(s->entries->target + i * of->result, total, count);
        else
            copy(s->entries->target + i * of->size, total, count * of->size,
                 s->form & STREAM_RESULTS);
    }
    s->taken += s->piece;
    if (s->form & STREAM_RESULTS) FENCE();
}

/* Return whether there are pieces that have not been copied into a place. */
static int has_more(const sum *s) {
    if (s->direct) return 0;
    if (s->of) return s->put < s->longest;
    if (s->takes) return s->put < s->nbytes;
    cursor probe = s->laid;
    const type *of;
    size_t used = 0;
    return run_of(s, &probe, &used, &of) > 0;
}

static trials *trials_of(sum *s) {
    int none = s->nbytes + s->kept_bytes < STREAM_FROM || s->reads == ALWAYS;
    return none ? NULL : s->kinds + s->results_are;
}

/* Return whether the next call of this kind should be direct: if that is faster, or to measure the
 * slower way again. Reading the memory of other processes is fast if they use huge pages. */
static int wants_direct(trials *of, int lengthy) {
    double direct = of->seconds[DIRECT], other = of->seconds[fastest(of)];
    int faster = direct && direct < other, close = direct < 2 * other && other < 2 * direct;
    if (faster) of->best = DIRECT;
    unsigned first = first_trials(lengthy), round = of->calls / (2 * BETWEEN_TRIALS);
    if (of->calls < first + 2) return of->calls >= first;
    /* The two trials are between those of the other forms. */
    unsigned turn = of->calls % (2 * BETWEEN_TRIALS) / 2;
    int tries = turn == BETWEEN_TRIALS / 4 * 3 && (close || round % 16 == 0);
    return tries ? !faster : faster;
}

/* After the header, let all ranks take the same way: return whether some ranks have written their
 * addresses into their places, and other ranks their values. This is rare: usually all ranks have
 * followed rank 0's wish in the last call. */
static int agree_on_way(sum *s) {
    kernel *k = s->kernel;
    record *all = k->records + (k->tick & 1) * (size_t)k->size;
    uint32_t first = atomic_load_explicit(&all->ways, memory_order_relaxed), mixed = 0;
    for (int rank = 1; rank < k->size; rank++)
        mixed |= first ^ atomic_load_explicit(&all[rank].ways, memory_order_relaxed);
    s->next_direct = (first & WISHED) != 0;
    return (mixed & ADDRESSED) != 0;
}

/* Begin to time a call, or a part of a long call, called a lap. Each lap of a long call may use
 * another form, so that the trial of a slow form does not slow down the whole call. */
static void begin_lap(sum *s) {
    trials *of = trials_of(s);
    s->form = PLAIN;
    if (of && s->direct)
        s->form = DIRECT, of->calls++;
    else if (of)
        s->form = next_form(of, s->nbytes >= LONG_FROM);
    s->timed = of != NULL, s->lap = 0;
    s->seconds = of ? -now() : 0;
}

static void end_lap(sum *s) {
    int lengthy = s->nbytes >= LONG_FROM;
    double seconds = s->seconds + now();
    if (s->direct && lengthy) seconds *= (double)LONG_FROM / (double)s->nbytes;
    if (s->timed && learn(trials_of(s), s->form, seconds, lengthy))
        s->kernel->wanted_trials = s->kernel->num_trials + 1;
}

/* Begin a call: copy the first piece into this rank's place, before the header is posted. */
static void begin(sum *s) {
    s->laid = s->added = s->copied = start_of(s);
    s->put = s->taken = 0;
    if (s->num_trials != s->kernel->num_trials) {
        for (int i = 0; i < NUM_KINDS; i++)
            memset(s->kinds[i].seconds, 0, sizeof s->kinds[i].seconds), s->kinds[i].calls = 0;
        s->num_trials = s->kernel->num_trials;
    }
    s->direct = s->reads == ALWAYS || (s->reads && s->next_direct);
    begin_lap(s);
    if (s->reads == SOMETIMES) {
        trials *of = trials_of(s);
        int wished = of && s->kernel->rank == 0 && wants_direct(of, s->nbytes >= LONG_FROM);
        s->kernel->ways = (s->direct ? ADDRESSED : 0) | (wished ? WISHED : 0);
    }
    s->turn = 0;
    /* A call without values needs a place only for its header, in a message. */
    if (s->nbytes || !s->takes || s->kernel->slot == s->kernel->ring) {
        s->place = take(s);
        lay_out(s, s->place);
    }
    if (s->timed) s->seconds += now();
    s->follows = 0, s->state = IN_HEADER;
}

/* Continue a call after its header as far as possible: return DONE, or another return code. */
static int advance(sum *s, long looks) {
    kernel *k = s->kernel;
    for (;;) {
        int found = look_often(k, looks);
        if (found == STEP_AWAITED) {
            /* A rank whose arrays others read may have nothing to do but wait. */
            s->timed &= s->direct && s->state != IN_HEADER;
            return s->state == IN_HEADER ? HEADER_AWAITED : STEP_AWAITED;
        }
        if (found == DIFFERS) return s->state == IN_HEADER ? DIFFERS : STEP_DIFFERS;
        if (s->state == IN_HEADER && trials_of(s)) {
            agree_on_trials(k);
            s->seconds -= now();
        }
        if (s->state == IN_HEADER && s->reads == SOMETIMES && agree_on_way(s)) {
            if (s->direct) {
                s->direct = s->timed = 0, s->form = PLAIN;
                lay_out(s, s->place);
            }
            s->state = IN_PLACES;
            post(k, 0, s->digest ^ k->next, 0);
            continue;
        }
        if (s->state == IN_STEP) {
            if (s->scattered) copy_out(s);
            s->place = s->after;
            if (!s->follows) break;
        }
        s->state = IN_STEP;
        s->follows = has_more(s);
        if (s->follows) {
            s->after = take(s);
            lay_out(s, s->after);
        }
        if (s->direct) {
            if (!read_blocks(s)) {
                s->state = IN_HEADER;
                return NOT_READ;
            }
            /* No rank may change its arrays before all ranks have read them. */
            post(k, 0, s->digest ^ k->next, 0);
            continue;
        }
        if (s->scattered) {
            add_segments(s);
            post(k, 0, s->digest ^ k->next, 0);
        } else {
            if (s->follows) {
                post(k, 0, s->digest ^ k->next, 0);
                wake(k);
            }
            if (s->of)
                add_parts(s);
            else if (s->takes)
                take_blocks(s);
            else
                add_piece(s);
        }
        s->lap += s->of ? s->piece * s->of->size * (size_t)k->size : s->piece;
        if (!s->scattered && !s->follows) break;
        if (s->follows && s->lap >= LONG_FROM && trials_of(s)) {
            end_lap(s);
            begin_lap(s);
        }
    }
    s->state = IDLE;
    if (s->nbytes < LONG_FROM || s->lap >= LONG_FROM || s->direct) end_lap(s);
    return DONE;
}

/* ---- The interface to Python ---------------------------------------------------------- */

static int is_like(PyObject *value, PyObject *expected, int flags) {
    if (!PyArray_CheckExact(value)) return 0;
    PyArrayObject *array = (PyArrayObject *)value, *like = (PyArrayObject *)expected;
    if ((PyArray_FLAGS(array) & flags) != flags || !PyArray_SAMESHAPE(array, like)) return 0;
    return PyArray_DESCR(array) == PyArray_DESCR(like) ||
           PyArray_EquivTypes(PyArray_DESCR(array), PyArray_DESCR(like));
}

/* Return array `i` of a list, or the value itself if it is a single array; a borrowed reference. */
static PyObject *item(PyObject *value, int i) {
    return PyList_CheckExact(value) ? PyList_GetItem(value, i) : value;
}

/* Store the addresses of arrays, or of results (`writes`); return 0 if an array does not have the
 * expected shape or dtype, or is not contiguous. */
static int find(sum *s, PyObject *values, int writes) {
    int count = writes ? s->num_results : s->num_arrays;
    if (PyList_CheckExact(values) ? PyList_Size(values) != count : count != 1) return 0;
    int flags = writes ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO;
    if (s->takes && !s->of) flags &= ~NPY_ARRAY_ALIGNED;
    PyObject *likes = writes ? s->result_likes : s->likes;
    s->number += !writes;
    for (int i = 0; i < count; i++) {
        PyObject *array = item(values, s->entries[i].array);
        if (!is_like(array, item(likes, s->entries[i].array), flags)) return 0;
        char *data = PyArray_DATA((PyArrayObject *)array);
        if (writes)
            s->entries[i].target = data;
        else
            s->entries[i].source = data;
    }
    return 1;
}

static void put(PyObject **into, PyObject *value) {
    PyObject *old = *into;
    *into = Py_XNewRef(value);
    Py_XDECREF(old);
}

static void let_go(sum *s) {
    Py_CLEAR(s->arrays);
    Py_CLEAR(s->results);
}

typedef struct {
    uintptr_t begin, end;
    int writes;
} extent;

static int compare_extents(const void *one, const void *other) {
    uintptr_t a = ((const extent *)one)->begin, b = ((const extent *)other)->begin;
    return (a > b) - (a < b);
}

/* Return whether each result is the memory of its own array, or overlaps with no array. */
static int lie_apart(const sum *s) {
    size_t n = (size_t)(s->num_arrays + s->num_results), found = 0;
    extent few[2], *extents = n > 2 ? PyMem_Malloc(n * sizeof *extents) : few;
    if (!extents) return 0;
    for (int b = 0; b < s->num_buckets; b++) {
        const type *of = s->buckets[b].type;
        for (int i = s->buckets[b].first; i < s->buckets[b].end; i++) {
            uintptr_t source = (uintptr_t)s->entries[i].source,
                      target = (uintptr_t)s->entries[i].target;
            if (!s->entries[i].count) continue;
            extents[found++] = (extent){target, target + s->entries[i].count * of->result, 1};
            if (source == target && of->size == of->result) continue;
            extents[found++] = (extent){source, source + s->entries[i].count * of->size, 0};
        }
    }
    for (int i = 0; s->takes && i < s->num_results; i++) {
        uintptr_t target = (uintptr_t)s->entries[i].target;
        if (s->entries[i].written)
            extents[found++] = (extent){target, target + s->entries[i].written, 1};
    }
    for (int i = 0; s->takes && i < s->num_arrays; i++) {
        uintptr_t source = (uintptr_t)s->entries[i].source;
        size_t nbytes = s->entries[i].count * (s->of ? s->of->size : 1);
        if (i == s->own_source && s->entries[i].source == s->entries[s->own_result].target &&
            nbytes == s->entries[s->own_result].written)
            continue;
        if (nbytes) extents[found++] = (extent){source, source + nbytes, 0};
    }
    qsort(extents, found, sizeof *extents, compare_extents);
    /* The highest end of the extents before this one, and of the written extents among them. */
    uintptr_t end = 0, written = 0;
    int apart = 1;
    for (size_t i = 0; i < found; i++) {
        apart &= extents[i].begin >= (extents[i].writes ? end : written);
        if (extents[i].end > end) end = extents[i].end;
        if (extents[i].writes && extents[i].end > written) written = extents[i].end;
    }
    if (n > 2) PyMem_Free(extents);
    return apart;
}

/* Return new arrays for the results: a list if `listed` is true, else a single array. */
static PyObject *make_results(const sum *s, int listed) {
    int small = s->allocate == Py_None;
    PyObject *results = small ? PyList_New(s->num_results) : PyObject_CallNoArgs(s->allocate);
    for (int i = 0; small && results && i < s->num_results; i++) {
        PyArrayObject *like = (PyArrayObject *)PyList_GetItem(s->result_likes, i);
        PyObject *one = PyArray_NewLikeArray(like, NPY_CORDER, NULL, 0);
        if (!one || PyList_SetItem(results, i, one)) Py_CLEAR(results);
    }
    if (listed || !results || s->num_results != 1) return results;
    PyObject *one = Py_XNewRef(PyList_GetItem(results, 0));
    Py_DECREF(results);
    return one;
}

/* Begin a call for arrays that `find` has accepted, if the results are as expected. A `whole` call
 * also requires that no arrays overlap, and that a call may begin. Return 1 if the call has begun,
 * 0 if not, or -1 with an error. While the results are allocated, Python may run other threads,
 * which may use this sum: so the function checks afterwards whether they did. From this check to
 * the header no Python code runs. */
static int start(sum *s, PyObject *arrays, PyObject *results, int whole) {
    kernel *k = s->kernel;
    if (!is_open(k)) return -1;
    int listed = PyList_CheckExact(arrays);
    unsigned number = s->number;
    if (whole && !is_free(k)) return 0;
    if (results != Py_None && PyList_CheckExact(results) != listed && !s->takes) return 0;
    let_go(s);
    PyObject *kept = NULL,
             *into = results == Py_None ? make_results(s, listed) : Py_NewRef(results);
    /* Keep references to the arrays themselves, because the lists may change during the call. A
     * barrier has no arrays. */
    if (into && (s->num_arrays || s->num_results) && (listed || PyList_CheckExact(into)))
        kept = Py_BuildValue("NN", listed ? PyList_GetSlice(arrays, 0, s->num_arrays) : Py_NewRef(arrays),
                             PyList_CheckExact(into) ? PyList_GetSlice(into, 0, s->num_results) : Py_NewRef(into));
    else if (into)
        kept = Py_NewRef(arrays);
    int good = kept ? s->number == number && (!whole || is_free(k)) : -1;
    if (good > 0) {
        s->near = find(s, into, 1) ? results == Py_None || lie_apart(s) : -1;
        good = s->near >= whole;
    }
    if (good <= 0) {
        Py_XDECREF(into);
        Py_XDECREF(kept);
        return good;
    }
    s->arrays = kept, s->results = into;
    int in_place = s->num_arrays && s->entries->source == s->entries->target;
    s->results_are = in_place ? IN_PLACE : results == Py_None ? NEW : GIVEN;
    begin(s);
    return 1;
}

/* start(arrays, results): begin a call, before its header. Return False if the arrays or results
 * are not as expected. */
static PyObject *sum_start(PyObject *self, PyObject *args) {
    sum *s = (sum *)self;
    PyObject *arrays, *results;
    if (!PyArg_ParseTuple(args, "OO", &arrays, &results)) return NULL;
    int started = find(s, arrays, 0) ? start(s, arrays, results, 0) : 0;
    return started < 0 ? NULL : PyBool_FromLong(started);
}

/* Store that this thread is in a call; return the thread that was stored before. */
static unsigned long enter(kernel *k, PyObject *what) {
    unsigned long outer = k->thread;
    if (!outer) put(&k->what, what);
    k->thread = PyThread_get_thread_ident();
    return outer;
}

/* Continue a call. The interpreter lock is released for large arrays, if ranks are late, or before
 * other processes may take the core. Other threads then see that this thread is in a call. */
static int go_on(sum *s, long looks) {
    int large = s->nbytes >= UNLOCKED_FROM || s->kept_bytes >= UNLOCKED_FROM;
    long few = s->kernel->yields ? 0 : looks < 100 ? looks : 100;
    int found = large ? 0 : advance(s, few);
    if (s->state != IDLE && (large || (found && looks > few))) {
        unsigned long outer = enter(s->kernel, s->kept[WHAT]);
        PyThreadState *thread = PyEval_SaveThread();
        found = advance(s, looks);
        PyEval_RestoreThread(thread);
        s->kernel->thread = outer;
    }
    return found;
}

/* go_on(looks): continue a call after its header; return DONE or another return code. */
static PyObject *sum_go_on(PyObject *self, PyObject *looks) {
    sum *s = (sum *)self;
    long most = PyLong_AsLong(looks);
    if (most == -1 && PyErr_Occurred()) return NULL;
    if (s->state == IDLE) return PyErr_Format(PyExc_RuntimeError, "no call is under way");
    return PyLong_FromLong(go_on(s, most));
}

/* held(): return the arrays and the results of the call under way, each as a list or an array. */
static PyObject *sum_held(PyObject *self, PyObject *Py_UNUSED(none)) {
    sum *s = (sum *)self;
    if (!s->results) return PyErr_Format(PyExc_RuntimeError, "no call is under way");
    return PyTuple_CheckExact(s->arrays) ? Py_NewRef(s->arrays)
                                         : Py_BuildValue("OO", s->arrays, s->results);
}

/* take_results(): return the results, and release the arrays. */
static PyObject *sum_take_results(PyObject *self, PyObject *Py_UNUSED(none)) {
    sum *s = (sum *)self;
    if (!s->results) return PyErr_Format(PyExc_RuntimeError, "no call has been made");
    PyObject *results = Py_NewRef(s->results);
    let_go(s);
    return results;
}

/* Make a whole call for arrays that `find` has accepted; see `sum_reduce`. */
static PyObject *reduce(sum *s, PyObject *arrays, PyObject *results) {
    kernel *k = s->kernel;
    int started = start(s, arrays, results, 1);
    if (started < 0) return NULL;
    if (!started) Py_RETURN_NONE;
    k->num_calls++;
    post(k, k->run_fingerprint, s->digest ^ k->next, 0);
    int found = go_on(s, k->looks);
    if (found != DONE) return PyLong_FromLong(found);
    put(&k->last_call, s->call);
    return sum_take_results((PyObject *)s, NULL);
}

/* reduce(arrays, results): make a whole call: start, the header, and go_on. Return the results (new
 * arrays if `results` is None), or a return code if the call has to wait. Return None, without
 * having done anything, if the arrays are not as expected, or overlap, or if no call may begin. */
static PyObject *sum_reduce(PyObject *self, PyObject *args) {
    sum *s = (sum *)self;
    PyObject *arrays, *results;
    if (!PyArg_ParseTuple(args, "OO", &arrays, &results)) return NULL;
    if (!find(s, arrays, 0)) Py_RETURN_NONE;
    return reduce(s, arrays, results);
}

/* Return the slot of `value` in the hash table: by its shape, or by the number of its arrays. */
static sum **slot_of(kernel *k, PyObject *value) {
    uint64_t hash = 1;
    if (PyList_CheckExact(value)) {
        hash = (uint64_t)PyList_Size(value) * 0x9e3779b97f4a7c15;
    } else if (PyArray_CheckExact(value)) {
        PyArrayObject *array = (PyArrayObject *)value;
        for (int i = 0; i < PyArray_NDIM(array); i++)
            hash = (hash + (uint64_t)PyArray_DIM(array, i)) * 0x9e3779b97f4a7c15;
    }
    return k->repeated + (hash >> 7) % NUM_SLOTS;
}

/* keep(repeat, what, names, listed, wait, leave, exchange, continues): add this sum to the hash table
 * of `repeat`. `exchange` is for two workers of one replica, see `exchange`; for others it is ().
 * `continues` says whether `wait` is to be called after the exchange, too. */
static PyObject *sum_keep(PyObject *self, PyObject *args) {
    sum *s = (sum *)self;
    PyObject *kept[NUM_KEPT];
    if (s->slot) Py_RETURN_NONE;
    if (!PyArg_ParseTuple(args, "O!OO!pOOO!p", &PyCFunction_Type, kept, kept + WHAT, &PyTuple_Type,
                          kept + NAMES, &s->listed, kept + WAIT, kept + LEAVE, &PyTuple_Type,
                          kept + EXCHANGE, &s->continues))
        return NULL;
    kept[OWNER] = PyCFunction_GetSelf(kept[OWNER]);
    for (int i = 0; i < NUM_KEPT; i++) s->kept[i] = Py_XNewRef(kept[i]);
    s->slot = slot_of(s->kernel, s->listed ? s->likes : item(s->likes, 0));
    s->following = *s->slot;
    *s->slot = s;
    Py_RETURN_NONE;
}

/* Call function `which` of `exchange`; return whether its result is true, or -1 with an error. */
static int call(sum *s, int which) {
    PyObject *result = PyObject_CallNoArgs(PyTuple_GetItem(s->kept[EXCHANGE], which));
    int found = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return found;
}

/* Exchange headers and values with the only other worker: the values in the two places, and the
 * headers before them, are messages. The functions of `exchange` start the send and the receive,
 * and test the receive and the send. Return DONE once all values have arrived, HEADER_SENT if
 * Python must wait or compare the headers, or -1 with an error. */
static int exchange(sum *s) {
    enum { SEND, RECEIVE, TEST_RECEIVE, TEST_SEND, LAST_NUMBER, LOOKS = 64 };
    kernel *k = s->kernel;
    int64_t header[4] = {k->num_calls, k->run_fingerprint, (int64_t)s->digest, 0};
    header[3] = PyLong_AsLongLong(PyTuple_GetItem(s->kept[EXCHANGE], LAST_NUMBER));
    char *own = at(s, k->rank, s->place) - sizeof header;
    memcpy(own, header, sizeof header);
    if (call(s, SEND) < 0 || call(s, RECEIVE) < 0) return -1;
    int found = 0;
    for (int looks = LOOKS; !found && looks; looks--) found = call(s, TEST_RECEIVE);
    if (found < 0) return -1;
    if (!found || memcmp(at(s, !k->rank, s->place) - sizeof header, header, sizeof header))
        return HEADER_SENT;
    /* Wait for the send, too, because the next message uses the same memory. */
    found = call(s, TEST_SEND);
    if (found <= 0) return found < 0 ? -1 : HEADER_SENT;
    arrive(k);
    put(&k->last_call, s->call);
    if (!s->continues) go_on(s, 0);
    return DONE;
}

/* Let Python wait for missing ranks, and return the results. An error is reported to the other
 * ranks as an error of the call `what`. */
static PyObject *wait(sum *s, PyObject *what, PyObject *awaited) {
    kernel *k = s->kernel;
    long long before = k->num_calls - 1;
    unsigned long outer = enter(k, what);
    PyObject *type = NULL, *error = NULL, *trace = NULL, *told, *found = NULL;
    if (PyTuple_Size(s->kept[EXCHANGE])) {
        Py_DECREF(awaited);
        int exchanged = exchange(s);
        if (exchanged == DONE && !s->continues) {
            k->thread = outer;
            return sum_take_results((PyObject *)s, NULL);
        }
        /* Python raises the error after it has noted that messages are under way. */
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        awaited = PyLong_FromLong(exchanged < 0 ? HEADER_SENT : exchanged);
    }
    if (awaited)
        found = PyObject_CallFunctionObjArgs(s->kept[WAIT], s, awaited, error, NULL);
    PyObject *fetched[] = {awaited, type, error, trace};
    for (int i = 0; i < 4; i++) Py_XDECREF(fetched[i]);
    if (!found) {
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        told = PyObject_CallFunction(s->kept[LEAVE], "OOL", what, error, before);
        if (told) PyErr_Restore(Py_XNewRef(type), Py_XNewRef(error), Py_XNewRef(trace));
        PyObject *owned[] = {type, error, trace, told};
        for (int i = 0; i < 4; i++) Py_XDECREF(owned[i]);
    }
    k->thread = outer;
    return found;
}

/* repeat(what, op, value, out[, nested]): make a call by the sum that `sum_keep` has added for its
 * kind. Return the results. Return None, without having done anything, if there is no such sum, or
 * if it cannot make the call: then Python code must make the call, and raises an error if one is
 * due. With five arguments, the call may be part of a call of this thread. */
static PyObject *repeat(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4 && count != 5) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, or 5");
    PyObject *what = args[0], *value = args[2];
    kernel *k = (kernel *)PyTuple_GetItem(self, 0);
    int listed = PyList_CheckExact(value);
    if (count == 4 && k->thread) Py_RETURN_NONE;
    sum *s = *slot_of(k, value);
    while (s && !(s->listed == listed && s->kept[OWNER] == self &&
                  PyObject_RichCompareBool(s->kept[WHAT], what, Py_EQ) > 0 &&
                  PySequence_Contains(s->kept[NAMES], args[1]) > 0 && find(s, value, 0) &&
                  /* Calls that move data may differ only in their results. */
                  (!s->takes || args[3] == Py_None || find(s, args[3], 1))))
        s = s->following;
    if (!s) Py_RETURN_NONE;
    Py_INCREF((PyObject *)s);
    PyObject *found = reduce(s, value, args[3]);
    if (!found && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        found = Py_NewRef(Py_None);
    } else if (found && PyLong_CheckExact(found)) {
        found = wait(s, what, found);
    }
    Py_DECREF((PyObject *)s);
    return found;
}

static void sum_dealloc(PyObject *self) {
    PyTypeObject *class = Py_TYPE(self);
    sum *s = (sum *)self, **link = s->slot;
    while (link && *link != s) link = &(*link)->following;
    if (link) *link = s->following;
    let_go(s);
    PyObject *owned[] = {s->likes, s->result_likes, s->call, s->allocate, (PyObject *)s->kernel};
    for (int i = 0; i < 5; i++) Py_XDECREF(owned[i]);
    for (int i = 0; i < NUM_KEPT; i++) Py_XDECREF(s->kept[i]);
    PyMem_Free(s->buckets);
    PyMem_Free(s->entries);
    block *blocks[] = {s->puts, s->takes, s->from, s->to};
    for (int i = 0; i < 4; i++) PyMem_Free(blocks[i]);
    ((freefunc)PyType_GetSlot(class, Py_tp_free))(self);
    Py_DECREF(class);
}

static size_t power_of_two(size_t nbytes) {
    size_t power = 32 << 10;
    while (power < nbytes) power *= 2;
    return power;
}

/* Group the arrays by type, in the order in which the types appear. */
static void sort(sum *s, const char *codes) {
    int taken = 0;
    for (int i = 0; i < s->num_arrays; i++) {
        const type *of = &TYPES[(unsigned char)codes[i]];
        int known = 0;
        for (int b = 0; b < s->num_buckets; b++) known |= s->buckets[b].type == of;
        if (known) continue;
        bucket *b = s->buckets + s->num_buckets++;
        b->type = of, b->first = taken, b->elements = 0;
        for (int j = i; j < s->num_arrays; j++) {
            if (codes[j] != codes[i]) continue;
            size_t elements = (size_t)PyArray_SIZE((PyArrayObject *)PyList_GetItem(s->likes, j));
            s->entries[taken].array = j, s->entries[taken++].count = elements;
            b->elements += elements;
        }
        b->end = taken;
        s->nbytes += b->elements * b->type->wide;
    }
}

/* Return whether a list contains exactly `count` arrays. */
static int holds_arrays(PyObject *list, Py_ssize_t count) {
    int holds = PyList_Size(list) == count;
    for (Py_ssize_t i = 0; holds && i < count; i++) holds = PyArray_Check(PyList_GetItem(list, i));
    return holds;
}

static PyObject *kernel_type, *sum_type;

/* Choose the size of the places for pieces of `piece` bytes, of a call of `used` bytes. */
static void place_pieces(sum *s, size_t used, size_t piece) {
    kernel *k = s->kernel;
    size_t most = power_of_two(piece);
    if (most > k->slot) most = k->slot;
    /* If a call has a single piece, its place is only as large as it needs. */
    s->place_bytes = power_of_two(used) < most ? power_of_two(used) : most;
    /* A ring of one place: its values are sent in messages, before the next call begins. */
    if (k->slot == k->ring) s->place_bytes = k->ring;
    s->stride = k->room;
}

static void hold(sum *s, kernel *k, PyObject *likes, PyObject *result_likes, PyObject *call,
                 PyObject *allocate, uint64_t digest) {
    s->kernel = (kernel *)Py_NewRef((PyObject *)k);
    s->likes = Py_NewRef(likes), s->result_likes = Py_NewRef(result_likes);
    s->call = Py_NewRef(call), s->allocate = Py_NewRef(allocate), s->digest = digest;
}

/* Sum(kernel, codes, likes, result_likes, piece_bytes, divisor, scattered, call, digest, allocate)
 */
static int sum_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(names)) {
    sum *s = (sum *)self;
    PyObject *owner, *likes, *result_likes, *call, *allocate;
    unsigned long long digest;
    const char *codes;
    Py_ssize_t num_arrays, piece;
    if (!PyArg_ParseTuple(args, "O!y#O!O!ndpOKO", kernel_type, &owner, &codes, &num_arrays,
                          &PyList_Type, &likes, &PyList_Type, &result_likes, &piece, &s->divisor,
                          &s->scattered, &call, &digest, &allocate))
        return -1;
    kernel *k = (kernel *)owner;
    int good = num_arrays > 0 && num_arrays < INT32_MAX && holds_arrays(likes, num_arrays) &&
               holds_arrays(result_likes, num_arrays);
    for (Py_ssize_t i = 0; good && i < num_arrays; i++) good = (unsigned char)codes[i] < NUM_TYPES;
    if (!good || piece < LINE || piece % LINE || (size_t)piece > k->slot) {
        PyErr_SetString(PyExc_ValueError, "expected arrays of known types, and pieces that fit");
        return -1;
    }
    size_t n = (size_t)num_arrays;
    s->num_arrays = (int)num_arrays, s->piece = (size_t)piece;
    s->buckets = PyMem_Calloc(n < NUM_TYPES ? n : NUM_TYPES, sizeof *s->buckets);
    s->entries = PyMem_Calloc(n, sizeof *s->entries);
    if (!s->buckets || !s->entries) {
        PyErr_NoMemory();
        return -1;
    }
    s->num_results = s->num_arrays;
    hold(s, k, likes, result_likes, call, allocate, digest);
    sort(s, codes);
    /* The end of each run may leave a part of a cache line unused. */
    place_pieces(s, s->nbytes + LINE * (size_t)s->num_buckets, s->piece);
    return 0;
}

static size_t bytes_of(PyObject *list, Py_ssize_t i) {
    PyArrayObject *array = (PyArrayObject *)PyList_GetItem(list, i);
    return (size_t)PyArray_SIZE(array) * (size_t)PyArray_ITEMSIZE(array);
}

/* Read blocks from a buffer of int64 with seven numbers for each. Return NULL with an error unless
 * every block lies in its array, and in a stream of `nbytes`. One more block is allocated, so that
 * the result is not NULL. */
static block *blocks_from(PyObject *numbers, PyObject *likes, const sum *s, size_t nbytes,
                          int *count) {
    Py_buffer view;
    if (PyObject_GetBuffer(numbers, &view, PyBUF_SIMPLE)) return NULL;
    const int64_t *from = view.buf;
    size_t n = (size_t)view.len / (7 * sizeof *from);
    block *blocks = PyMem_Calloc(n + 1, sizeof *blocks);
    int good = blocks && n < INT32_MAX;
    for (size_t i = 0; good && i < n; i++, from += 7) {
        for (int j = 0; j < 7; j++) good &= from[j] >= 0;
        good = good && from[0] < s->kernel->size && from[1] < PyList_Size(likes) && from[4] && from[5];
        if (!good) break;
        blocks[i] = (block){(int)from[0], (int)from[1], (size_t)from[2], (size_t)from[3],
                            (size_t)from[4], (size_t)from[5], (size_t)from[6]};
        const block *b = blocks + i;
        size_t last, whole, room = bytes_of(likes, b->array);
        good = !__builtin_mul_overflow(b->count - 1, b->stride, &last) &&
               !__builtin_mul_overflow(b->count, b->chunk, &whole) && b->at <= room &&
               last <= room && b->chunk <= room && b->at + last + b->chunk <= room &&
               whole <= nbytes && b->offset <= nbytes - whole;
    }
    PyBuffer_Release(&view);
    if (!good) {
        PyMem_Free(blocks);
        PyErr_SetString(PyExc_ValueError, "expected blocks that lie in their arrays");
        return NULL;
    }
    *count = (int)n;
    return blocks;
}

/* move(kernel, puts, takes, nbytes, own_source, own_result, likes, result_likes, piece_bytes, call,
 * digest, allocate, reads, from, to): return an object like a Sum for calls that move data. Each rank
 * has a stream of bytes, at most `nbytes` long: the blocks `puts` of its arrays. It takes the blocks
 * `takes` from the streams of all ranks into its results. If `reads` is 1, they read each other's
 * arrays if that is faster, if 2 always (in tests). It copies the blocks `from` of its arrays to `to`
 * of its results, blocks of equal sizes, and fills the other blocks of `to` with zeros. */
static PyObject *make_move(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *owner, *puts, *takes, *likes, *result_likes, *call, *allocate, *from, *to;
    Py_ssize_t nbytes, piece;
    int own_source, own_result, reads;
    unsigned long long digest;
    if (!PyArg_ParseTuple(args, "O!OOniiO!O!nOKOiOO", kernel_type, &owner, &puts, &takes, &nbytes,
                          &own_source, &own_result, &PyList_Type, &likes, &PyList_Type,
                          &result_likes, &piece, &call, &digest, &allocate, &reads, &from, &to))
        return NULL;
    kernel *k = (kernel *)owner;
    Py_ssize_t num_arrays = PyList_Size(likes), num_results = PyList_Size(result_likes);
    if (nbytes < 0 || piece < LINE || piece % LINE || (size_t)piece > k->slot ||
        own_source >= num_arrays || (own_source >= 0 && (own_result < 0 || own_result >= num_results)) ||
        num_arrays > INT32_MAX / 2 || num_results > INT32_MAX / 2 || !holds_arrays(likes, num_arrays) ||
        !holds_arrays(result_likes, num_results))
        return PyErr_Format(PyExc_ValueError, "expected arrays, and pieces that fit");
    PyObject *self = PyType_GenericNew((PyTypeObject *)sum_type, NULL, NULL);
    if (!self) return NULL;
    sum *s = (sum *)self;
    hold(s, k, likes, result_likes, call, allocate, digest);
    s->num_arrays = (int)num_arrays, s->num_results = (int)num_results;
    s->nbytes = (size_t)nbytes, s->piece = (size_t)piece;
    s->own_source = own_source, s->own_result = own_result;
    size_t most = (size_t)(num_arrays > num_results ? num_arrays : num_results);
    s->entries = PyMem_Calloc(most + 1, sizeof *s->entries);
    s->puts = blocks_from(puts, likes, s, s->nbytes, &s->num_puts);
    s->takes = s->puts ? blocks_from(takes, result_likes, s, s->nbytes, &s->num_takes) : NULL;
    s->from = s->takes ? blocks_from(from, likes, s, SIZE_MAX, &s->num_from) : NULL;
    s->to = s->from ? blocks_from(to, result_likes, s, SIZE_MAX, &s->num_to) : NULL;
    if (!s->entries || !s->to) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    for (size_t i = 0; i < most; i++) {
        s->entries[i].array = (int)i;
        if (i < (size_t)num_arrays) s->entries[i].count = bytes_of(likes, (Py_ssize_t)i);
        if (i < (size_t)num_results) s->entries[i].written = bytes_of(result_likes, (Py_ssize_t)i);
    }
    for (int i = 0; i < s->num_takes; i++) s->own_taken |= s->takes[i].rank == k->rank;
    int fits = s->num_from <= s->num_to;
    for (int i = 0; i < s->num_to; i++) {
        size_t size = s->to[i].chunk * s->to[i].count;
        s->kept_bytes += size;
        fits = fits && (i >= s->num_from || size == s->from[i].chunk * s->from[i].count);
    }
    if (!fits) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, "expected copies between blocks of equal sizes");
    }
    if (own_source >= 0 && s->entries[own_source].count != s->entries[own_result].written) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, "expected own arrays of equal sizes");
    }
    size_t room = ((size_t)s->num_puts + 1) * sizeof(source);
    if (reads && (!k->processes || room > k->slot || room > ADDRESSES_BYTES)) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_ValueError, "expected few arrays, which other ranks may read");
    }
    s->reads = reads > ALWAYS ? ALWAYS : (unsigned)reads;
    place_pieces(s, s->nbytes, s->piece);
    return self;
}

/* scatter(kernel, code, likes, result_like, columns, divisor, call, digest): return an object like a
 * Sum for calls in which each rank adds its part over all ranks; `likes` has the parts for all
 * ranks, and `columns` is the number of elements of each part in a piece. */
static PyObject *make_scatter(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *owner, *likes, *result_likes, *call;
    Py_ssize_t columns;
    unsigned long long digest;
    double divisor;
    int code;
    if (!PyArg_ParseTuple(args, "O!iO!O!ndOK", kernel_type, &owner, &code, &PyList_Type, &likes,
                          &PyList_Type, &result_likes, &columns, &divisor, &call, &digest))
        return NULL;
    kernel *k = (kernel *)owner;
    int good = code >= 0 && code < NUM_TYPES && columns > 0 && holds_arrays(likes, k->size) &&
               holds_arrays(result_likes, 1);
    size_t size = good ? TYPES[code].size : 1, longest = 0;
    good = good && (size_t)columns <= k->slot / size / (size_t)k->size && TYPES[code].result == size;
    for (int i = 0; good && i < k->size; i++) {
        size_t nbytes = bytes_of(likes, i);
        good = nbytes % size == 0 && (i != k->rank || nbytes == bytes_of(result_likes, 0));
        longest = nbytes / size > longest ? nbytes / size : longest;
    }
    if (!good) return PyErr_Format(PyExc_ValueError, "expected a part for each rank, and a result");
    PyObject *self = PyType_GenericNew((PyTypeObject *)sum_type, NULL, NULL);
    if (!self) return NULL;
    sum *s = (sum *)self;
    hold(s, k, likes, result_likes, call, Py_None, digest);
    s->num_arrays = k->size, s->num_results = 1, s->divisor = divisor;
    s->of = TYPES + code, s->longest = longest, s->piece = (size_t)columns;
    s->nbytes = longest * size * (size_t)k->size;
    s->own_source = k->rank, s->own_result = 0;
    s->entries = PyMem_Calloc((size_t)k->size, sizeof *s->entries);
    s->takes = PyMem_Calloc(1, sizeof *s->takes);
    if (!s->entries || !s->takes) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (int i = 0; i < k->size; i++)
        s->entries[i].array = i, s->entries[i].count = bytes_of(likes, i) / size;
    s->entries->written = bytes_of(result_likes, 0);
    if (longest < s->piece) s->piece = longest + !longest;
    size_t piece = s->piece * size * (size_t)k->size;
    place_pieces(s, piece, piece);
    return self;
}

/* post(run, digest, flags) */
static PyObject *kernel_post(PyObject *self, PyObject *args) {
    long long run;
    unsigned long long digest, flags;
    if (!PyArg_ParseTuple(args, "LKK", &run, &digest, &flags)) return NULL;
    if (!is_open((kernel *)self)) return NULL;
    post((kernel *)self, run, digest, flags);
    wake((kernel *)self);
    Py_RETURN_NONE;
}

/* repeater(): return a function `repeat` with the sums that `sum_keep` adds for it. */
static PyObject *kernel_repeater(PyObject *self, PyObject *Py_UNUSED(none)) {
    static PyMethodDef method = {"repeat", (PyCFunction)(void (*)(void))repeat, METH_FASTCALL,
                                 NULL};
    PyObject *owner = PyTuple_Pack(1, self), *made = owner ? PyCFunction_New(&method, owner) : NULL;
    Py_XDECREF(owner);
    return made;
}

static PyObject *kernel_agreed(PyObject *self, PyObject *Py_UNUSED(none)) {
    if (!is_open((kernel *)self)) return NULL;
    return PyBool_FromLong(look((kernel *)self) == DONE);
}

/* sleep(seconds): see `sleep_for_records`; other threads run meanwhile. */
static PyObject *kernel_sleep(PyObject *self, PyObject *seconds) {
    kernel *k = (kernel *)self;
    double most = PyFloat_AsDouble(seconds);
    if (most == -1 && PyErr_Occurred()) return NULL;
    if (!is_open(k)) return NULL;
    /* Another thread may close the kernel: keep the memory until this thread is awake. */
    Py_buffer held;
    if (PyObject_GetBuffer(k->segment.obj, &held, PyBUF_SIMPLE)) return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    sleep_for_records(k, most > 0 ? most : 0);
    PyEval_RestoreThread(thread);
    PyBuffer_Release(&held);
    Py_RETURN_NONE;
}

/* offer(token): store bytes that other ranks try to read; return their address. */
static PyObject *kernel_offer(PyObject *self, PyObject *token) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(token, &data, &size)) return NULL;
    if (size != TOKEN_BYTES)
        return PyErr_Format(PyExc_ValueError, "expected a token of %d bytes", TOKEN_BYTES);
    memcpy(((kernel *)self)->token, data, TOKEN_BYTES);
    return PyLong_FromVoidPtr(((kernel *)self)->token);
}

/* reads(rank, process, address, token): return whether this rank can read the memory of a process,
 * where another rank has stored its token. */
static PyObject *kernel_reads(PyObject *self, PyObject *args) {
    kernel *k = (kernel *)self;
    char found[TOKEN_BYTES] = {0};
    int rank;
    long process;
    unsigned long long address;
    const char *token;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "ilKy#", &rank, &process, &address, &token, &size)) return NULL;
    if (rank < 0 || rank >= k->size || size != TOKEN_BYTES)
        return PyErr_Format(PyExc_ValueError, "expected a rank, and a token of %d bytes", TOKEN_BYTES);
    if (!k->processes) k->processes = PyMem_Calloc((size_t)k->size, sizeof *k->processes);
    if (!k->processes) return PyErr_NoMemory();
    k->processes[rank] = process;
    return PyBool_FromLong(read_memory(process, address, found, TOKEN_BYTES, 1, 0) &&
                           !memcmp(found, token, TOKEN_BYTES));
}

/* arrive(): see `arrive` */
static PyObject *kernel_arrive(PyObject *self, PyObject *Py_UNUSED(none)) {
    if (!is_open((kernel *)self)) return NULL;
    arrive((kernel *)self);
    Py_RETURN_NONE;
}

static PyObject *kernel_close(PyObject *self, PyObject *Py_UNUSED(none)) {
    kernel *k = (kernel *)self;
    if (k->segment.obj) PyBuffer_Release(&k->segment);
    Py_CLEAR(k->last_call);
    Py_RETURN_NONE;
}

static void kernel_dealloc(PyObject *self) {
    PyTypeObject *class = Py_TYPE(self);
    Py_XDECREF(kernel_close(self, NULL));
    Py_XDECREF(((kernel *)self)->what);
    PyMem_Free(((kernel *)self)->processes);
    ((freefunc)PyType_GetSlot(class, Py_tp_free))(self);
    Py_DECREF(class);
}

/* Kernel(segment, common_bytes, room_bytes, ring_bytes, slot_bytes, rank, size) */
static int kernel_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(names)) {
    kernel *k = (kernel *)self;
    PyObject *segment;
    Py_ssize_t common, room, ring, slot;
    if (!PyArg_ParseTuple(args, "Onnnnii", &segment, &common, &room, &ring, &slot, &k->rank,
                          &k->size))
        return -1;
    if (PyObject_GetBuffer(segment, &k->segment, PyBUF_WRITABLE)) return -1;
    int fits = k->size > 0 && k->rank >= 0 && k->rank < k->size && slot > 0 && slot <= ring && ring <= room &&
               common >= 2 * k->size * LINE && k->segment.len >= common + k->size * room &&
               (uintptr_t)k->segment.buf % LINE == 0 && common % LINE == 0 && room % LINE == 0;
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "expected a segment that holds records and rings");
        return -1;
    }
    k->records = k->segment.buf;
    k->rings = (char *)k->segment.buf + common;
    k->room = (size_t)room, k->ring = (size_t)ring, k->slot = (size_t)slot;
    k->attention = 1;
    return 0;
}

static PyMethodDef kernel_methods[] = {
    {"post", kernel_post, METH_VARARGS, NULL},
    {"agreed", kernel_agreed, METH_NOARGS, NULL},
    {"sleep", kernel_sleep, METH_O, NULL},
    {"arrive", kernel_arrive, METH_NOARGS, NULL},
    {"offer", kernel_offer, METH_O, NULL},
    {"reads", kernel_reads, METH_VARARGS, NULL},
    {"close", kernel_close, METH_NOARGS, NULL},
    {"repeater", kernel_repeater, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef kernel_members[] = {
    {"attention", T_BOOL, offsetof(kernel, attention), 0, NULL},
    {"yields", T_BOOL, offsetof(kernel, yields), 0, NULL},
    {"looks", T_INT, offsetof(kernel, looks), 0, NULL},
    {"run_fingerprint", T_LONGLONG, offsetof(kernel, run_fingerprint), 0, NULL},
    {"num_calls", T_LONGLONG, offsetof(kernel, num_calls), 0, NULL},
    {"thread", T_ULONG, offsetof(kernel, thread), 0, NULL},
    {"what", T_OBJECT, offsetof(kernel, what), 0, NULL},
    {"last_call", T_OBJECT, offsetof(kernel, last_call), 0, NULL},
    {"next", T_PYSSIZET, offsetof(kernel, next), 0, NULL},
    {"tick", T_ULONGLONG, offsetof(kernel, tick), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot kernel_slots[] = {
    {Py_tp_methods, kernel_methods}, {Py_tp_members, kernel_members}, {Py_tp_init, kernel_init},
    {Py_tp_dealloc, kernel_dealloc}, {Py_tp_new, PyType_GenericNew},  {0, NULL},
};
static PyType_Spec kernel_spec = {"hpcstrat.engine.native.kernel.Kernel", sizeof(kernel), 0,
                                  Py_TPFLAGS_DEFAULT, kernel_slots};

static PyMethodDef sum_methods[] = {
    {"start", sum_start, METH_VARARGS, NULL},
    {"go_on", sum_go_on, METH_O, NULL},
    {"held", sum_held, METH_NOARGS, NULL},
    {"take_results", sum_take_results, METH_NOARGS, NULL},
    {"reduce", sum_reduce, METH_VARARGS, NULL},
    {"keep", sum_keep, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot sum_slots[] = {
    {Py_tp_methods, sum_methods},
    {Py_tp_init, sum_init},
    {Py_tp_dealloc, sum_dealloc},
    {Py_tp_new, PyType_GenericNew},
    {0, NULL},
};
static PyType_Spec sum_spec = {"hpcstrat.engine.native.kernel.Sum", sizeof(sum), 0,
                               Py_TPFLAGS_DEFAULT, sum_slots};

static PyMethodDef functions[] = {
    {"move", make_move, METH_VARARGS, NULL},
    {"scatter", make_scatter, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "kernel", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernel(void) {
    if (PyArray_ImportNumPyAPI() < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    kernel_type = PyType_FromSpec(&kernel_spec);
    sum_type = PyType_FromSpec(&sum_spec);
    int good = made && kernel_type && sum_type &&
               !PyModule_AddObjectRef(made, "Kernel", kernel_type) &&
               !PyModule_AddObjectRef(made, "Sum", sum_type) &&
               !PyModule_AddIntConstant(made, "VERSION", 11);
    if (!good) Py_CLEAR(made);
    return made;
}
