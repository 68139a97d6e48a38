/* Functions that read rows of a file into given places of memory, in few system calls, and that
 * undo the filters shuffle and Fletcher32 of HDF5.
 *
 * Rows that are adjacent in the file, or that have small gaps between them, are read by one preadv,
 * each row into its place. A whole batch is read without the interpreter lock. This module uses
 * neither MPI nor NumPy, except for buffers of NumPy arrays.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/uio.h>

/* Linux's limits for one call: MOST_VECTORS vectors and MOST_BYTES bytes. Gaps up to MOST_GAP bytes
 * are read, too, unless the caller has a lower limit. */
enum { MOST_VECTORS = 1024, MOST_GAP = 4096 };
static const int64_t MOST_BYTES = 0x7ffff000;

typedef struct {
    int fd;
    const int64_t *offsets, *places;
    int64_t rows, row_bytes, most_gap;
    char *out;
} request;

/* Fill `vectors` for a run of rows that begins at row `first` and can be read by one call; return
 * the row after the run. */
static int64_t run(const request *r, int64_t first, struct iovec *vectors, int *used) {
    static char gap_bytes[MOST_GAP];
    int64_t end = r->offsets[first], total = 0, row = first;
    int count = 0;
    for (; row < r->rows; row++) {
        int64_t gap = r->offsets[row] - end;
        if (gap > r->most_gap || gap < 0 || count + 2 > MOST_VECTORS) break;
        if (row > first && total + gap + r->row_bytes > MOST_BYTES) break;
        if (gap) vectors[count++] = (struct iovec){gap_bytes, (size_t)gap};
        char *place = r->out + (r->places ? r->places[row] : row) * r->row_bytes;
        struct iovec *last = count && !gap ? vectors + count - 1 : NULL;
        if (last && (char *)last->iov_base + last->iov_len == place)
            last->iov_len += (size_t)r->row_bytes;
        else
            vectors[count++] = (struct iovec){place, (size_t)r->row_bytes};
        end += gap + r->row_bytes;
        total += gap + r->row_bytes;
    }
    *used = count;
    return row;
}

/* Read all bytes of the vectors; return 1, or 0 at the end of the file, or -1 with errno set. */
static int fill(int fd, struct iovec *vectors, int count, int64_t offset) {
    while (count) {
        ssize_t got = preadv(fd, vectors, count, offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return (int)got;
        offset += got;
        while (count && (size_t)got >= vectors->iov_len) {
            got -= (ssize_t)vectors->iov_len;
            vectors++, count--;
        }
        if (count) {
            vectors->iov_base = (char *)vectors->iov_base + got;
            vectors->iov_len -= (size_t)got;
        }
    }
    return 1;
}

/* Read all rows; return the number of rows before the end of the file, or -1 with errno set. */
static int64_t read_all(const request *r, int announces) {
    struct iovec vectors[MOST_VECTORS];
    int count;
    for (int64_t row = 0, next; announces && row < r->rows; row = next) {
        next = run(r, row, vectors, &count);
        int64_t end = r->offsets[next - 1] + r->row_bytes;
        posix_fadvise(r->fd, r->offsets[row], end - r->offsets[row], POSIX_FADV_WILLNEED);
    }
    for (int64_t row = 0, next; row < r->rows; row = next) {
        next = run(r, row, vectors, &count);
        int done = fill(r->fd, vectors, count, r->offsets[row]);
        if (done < 0) return -1;
        if (!done) return row;
    }
    return r->rows;
}

/* Return whether the request stays within its buffers; if not, set a Python error. */
static int is_sound(const request *r, Py_ssize_t out_bytes) {
    int64_t room = r->row_bytes > 0 ? out_bytes / r->row_bytes : 0;
    for (int64_t row = 0; row < r->rows; row++) {
        int64_t place = r->places ? r->places[row] : row;
        int increases = !row || r->offsets[row] >= r->offsets[row - 1] + r->row_bytes;
        if (place >= 0 && place < room && r->offsets[row] >= 0 && increases) continue;
        PyErr_SetString(PyExc_ValueError, "expected increasing offsets and places inside");
        return 0;
    }
    return 1;
}

/* read_rows(fd, offsets, row_bytes, out, places, announces, most_gap) -> number of rows before the
 * end of the file. ``offsets`` (in the file) and ``places`` (indices of rows in ``out``; None for
 * the order of the offsets) are int64 arrays. If ``announces``, the operating system is first
 * advised to read all rows ahead. Gaps of more than ``most_gap`` bytes (default and limit:
 * MOST_GAP) are not read. */
static PyObject *read_rows(PyObject *Py_UNUSED(self), PyObject *args) {
    int fd, announces;
    long long row_bytes, most_gap = MOST_GAP;
    PyObject *offsets_of, *out_of, *places_of;
    if (!PyArg_ParseTuple(args, "iOLOOp|L", &fd, &offsets_of, &row_bytes, &out_of, &places_of,
                          &announces, &most_gap))
        return NULL;
    most_gap = most_gap < 0 ? 0 : most_gap > MOST_GAP ? MOST_GAP : most_gap;
    Py_buffer offsets, out, places = {.buf = NULL};
    if (PyObject_GetBuffer(offsets_of, &offsets, PyBUF_SIMPLE)) return NULL;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(out_of, &out, PyBUF_WRITABLE)) goto without_out;
    int has_places = places_of != Py_None;
    if (has_places && PyObject_GetBuffer(places_of, &places, PyBUF_SIMPLE)) goto without_places;
    request r = {fd, offsets.buf, places.buf, offsets.len / 8, row_bytes, most_gap, out.buf};
    if (has_places && places.len != offsets.len) {
        PyErr_SetString(PyExc_ValueError, "expected as many places as offsets");
    } else if (is_sound(&r, out.len)) {
        int64_t done;
        Py_BEGIN_ALLOW_THREADS done = read_all(&r, announces);
        Py_END_ALLOW_THREADS result =
            done < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLongLong(done);
    }
    if (has_places) PyBuffer_Release(&places);
without_places:
    PyBuffer_Release(&out);
without_out:
    PyBuffer_Release(&offsets);
    return result;
}

/* GCC vectorizes this loop only at -O3. With a constant `size` it interleaves whole vectors. */
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3"), always_inline))
#endif
static inline void
interleave(const uint8_t *restrict planes, uint8_t *restrict out, int64_t numbers, int size) {
    for (int64_t number = 0; number < numbers; number++)
        for (int byte = 0; byte < size; byte++)
            out[number * size + byte] = planes[byte * numbers + number];
}

#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3")))
#endif
static void
unshuffle_all(const uint8_t *planes, uint8_t *out, int64_t numbers, int size) {
    switch (size) {
    case 2: interleave(planes, out, numbers, 2); break;
    case 4: interleave(planes, out, numbers, 4); break;
    case 8: interleave(planes, out, numbers, 8); break;
    default: interleave(planes, out, numbers, size);
    }
}

/* unshuffle(planes, out, size): write numbers of ``size`` bytes into ``out``. ``planes`` has the
 * first bytes of all numbers, then the second bytes of all numbers, and so on. */
static PyObject *unshuffle(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *planes_of, *out_of, *result = NULL;
    int size;
    if (!PyArg_ParseTuple(args, "OOi", &planes_of, &out_of, &size)) return NULL;
    Py_buffer planes, out;
    if (PyObject_GetBuffer(planes_of, &planes, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(out_of, &out, PyBUF_WRITABLE)) goto without_out;
    if (size < 1 || planes.len != out.len || planes.len % size) {
        PyErr_SetString(PyExc_ValueError, "expected as many bytes as whole numbers have");
    } else {
        Py_BEGIN_ALLOW_THREADS unshuffle_all(planes.buf, out.buf, planes.len / size, size);
        Py_END_ALLOW_THREADS result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&out);
without_out:
    PyBuffer_Release(&planes);
    return result;
}

/* The sums must not overflow between two reductions: HDF5 adds 360 words at once, too. */
enum { WORDS_AT_ONCE = 360 };

static uint32_t fletcher32_of(const uint8_t *data, int64_t size) {
    uint32_t first = 0, second = 0;
    int64_t words = size / 2;
    while (words) {
        int64_t some = words < WORDS_AT_ONCE ? words : WORDS_AT_ONCE;
        words -= some;
        for (; some; some--, data += 2) second += first += (uint32_t)data[0] << 8 | data[1];
        first = (first & 0xffff) + (first >> 16);
        second = (second & 0xffff) + (second >> 16);
    }
    if (size % 2) {
        second += first += (uint32_t)data[0] << 8;
        first = (first & 0xffff) + (first >> 16);
        second = (second & 0xffff) + (second >> 16);
    }
    first = (first & 0xffff) + (first >> 16);
    second = (second & 0xffff) + (second >> 16);
    return second << 16 | first;
}

/* fletcher32(data): return the checksum that HDF5's filter stores, of big-endian words. */
static PyObject *fletcher32(PyObject *Py_UNUSED(self), PyObject *data_of) {
    Py_buffer data;
    uint32_t sum;
    if (PyObject_GetBuffer(data_of, &data, PyBUF_SIMPLE)) return NULL;
    Py_BEGIN_ALLOW_THREADS sum = fletcher32_of(data.buf, data.len);
    Py_END_ALLOW_THREADS PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(sum);
}

static PyMethodDef methods[] = {{"read_rows", read_rows, METH_VARARGS, NULL},
                                {"unshuffle", unshuffle, METH_VARARGS, NULL},
                                {"fletcher32", fletcher32, METH_O, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "reader", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_reader(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", 4)) Py_CLEAR(made);
    return made;
}
