/* A copy of bytes, with stores that bypass the cache, that computes their XXH3 hash (64 bits,
 * seed 0) in the same pass.
 *
 * The hash is that of the xxhash library, see XXH3 in github.com/Cyan4973/xxHash, for inputs whose
 * length is a multiple of 1024 bytes. Inputs may be passed in several parts of such lengths. This
 * module uses neither MPI nor NumPy. Its functions run without the interpreter lock.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* XXH3 hashes stripes; after each group of stripes it scrambles the accumulators. */
enum { STRIPE = 64, GROUP = 1024, LANES = 8, SECRET = 192, LAST_KEY = SECRET - STRIPE - 7 };
static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87ULL, PRIME64_2 = 0xC2B2AE3D27D4EB4FULL;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9ULL, PRIME64_4 = 0x85EBCA77C2B2AE63ULL;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5ULL, AVALANCHE = 0x165667919E3779F9ULL;
static const unsigned char secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t word(const void *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void scramble(uint64_t *acc) {
    for (int i = 0; i < LANES; i++)
        acc[i] = (acc[i] ^ (acc[i] >> 47) ^ word(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
}

/* Copy stripes one behind the other, and add them to the accumulators. */
typedef void add_stripes(uint64_t *acc, char *to, const char *from, int count,
                         const unsigned char *key);

static void add_plain(uint64_t *acc, char *to, const char *from, int count,
                      const unsigned char *key) {
    for (; count; count--, to += STRIPE, from += STRIPE, key += 8) {
        uint64_t values[LANES];
        memcpy(values, from, STRIPE);
        memcpy(to, values, STRIPE);
        for (int i = 0; i < LANES; i++) {
            uint64_t keyed = values[i] ^ word(key + 8 * i);
            acc[i ^ 1] += values[i];
            acc[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void
add_avx2(uint64_t *acc, char *to, const char *from, int count, const unsigned char *key) {
    __m256i sums[2] = {_mm256_loadu_si256((__m256i *)acc), _mm256_loadu_si256((__m256i *)acc + 1)};
    for (; count; count--, to += STRIPE, from += STRIPE, key += 8) {
        for (int i = 0; i < 2; i++) {
            __m256i values = _mm256_loadu_si256((const __m256i *)from + i);
            _mm256_stream_si256((__m256i *)to + i, values);
            __m256i keyed = _mm256_xor_si256(values, _mm256_loadu_si256((const __m256i *)key + i));
            __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            __m256i swapped = _mm256_shuffle_epi32(values, _MM_SHUFFLE(1, 0, 3, 2));
            sums[i] = _mm256_add_epi64(sums[i], _mm256_add_epi64(product, swapped));
        }
    }
    _mm256_storeu_si256((__m256i *)acc, sums[0]);
    _mm256_storeu_si256((__m256i *)acc + 1, sums[1]);
}
#endif

static uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t digest(const uint64_t *acc, uint64_t total) {
    uint64_t hash = total * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += folded(acc[i] ^ word(secret + 11 + 8 * i), acc[i + 1] ^ word(secret + 19 + 8 * i));
    hash = (hash ^ (hash >> 37)) * AVALANCHE;
    return hash ^ (hash >> 32);
}

/* Copy and hash `nbytes`, a multiple of GROUP. The last group of an input, which ends at `total`
 * bytes, is not scrambled, and its last stripe has another key. */
static uint64_t copy_part(uint64_t *acc, char *to, const char *from, int64_t nbytes,
                          uint64_t total) {
    add_stripes *add = add_plain;
    int per_group = GROUP / STRIPE;
#if defined(__x86_64__)
    /* Stores that bypass the cache need aligned places. */
    if (__builtin_cpu_supports("avx2") && !((uintptr_t)to & 31)) add = add_avx2;
#endif
    for (int64_t done = 0; done < nbytes; done += GROUP) {
        if (!total || done + GROUP < nbytes) {
            add(acc, to + done, from + done, per_group, secret);
            scramble(acc);
        } else {
            add(acc, to + done, from + done, per_group - 1, secret);
            add(acc, to + done + GROUP - STRIPE, from + done + GROUP - STRIPE, 1,
                secret + LAST_KEY);
        }
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
    return total ? digest(acc, total) : 0;
}

/* start() -> the accumulators of a new hash. */
static PyObject *start(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    const uint64_t first[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    return PyByteArray_FromStringAndSize((const char *)first, sizeof first);
}

/* copy(acc, to, from, total) -> hash. Copy the bytes of ``from``, and add them to the hash whose
 * accumulators are ``acc``. ``total`` is the length of the whole input in its last part, and 0 in
 * other parts, which return 0. */
static PyObject *copy(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *acc_of, *to_of, *from_of, *result = NULL;
    unsigned long long total;
    if (!PyArg_ParseTuple(args, "OOOK", &acc_of, &to_of, &from_of, &total)) return NULL;
    Py_buffer acc, to, from;
    if (PyObject_GetBuffer(acc_of, &acc, PyBUF_WRITABLE)) return NULL;
    if (PyObject_GetBuffer(to_of, &to, PyBUF_WRITABLE)) goto without_to;
    if (PyObject_GetBuffer(from_of, &from, PyBUF_SIMPLE)) goto without_from;
    if (acc.len != LANES * 8 || to.len != from.len || from.len % GROUP || (total && !from.len)) {
        PyErr_SetString(PyExc_ValueError, "expected buffers of one length, a multiple of 1024");
    } else {
        uint64_t hash;
        Py_BEGIN_ALLOW_THREADS hash = copy_part(acc.buf, to.buf, from.buf, from.len, total);
        Py_END_ALLOW_THREADS result = PyLong_FromUnsignedLongLong(hash);
    }
    PyBuffer_Release(&from);
without_from:
    PyBuffer_Release(&to);
without_to:
    PyBuffer_Release(&acc);
    return result;
}

static PyMethodDef methods[] = {
    {"start", start, METH_NOARGS, NULL}, {"copy", copy, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "hashed_copy", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_hashed_copy(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", 1)) Py_CLEAR(made);
    return made;
}
