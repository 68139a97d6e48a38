/* Update rules of optimizers, in one pass over the arrays of a variable.
 *
 * Each rule makes the operations of hpcstrat/optimizers in the same order for each element, so
 * that the results have NumPy's bits. NumPy itself makes one pass over the memory for each
 * operation. The arrays must be buffers of float32 or float64, all of the same length; a call
 * with any other arrays changes nothing and returns False. This module uses neither MPI nor NumPy.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>

#include "loops.h"

enum { MOST_ARRAYS = 4, UNLOCKED_FROM = 16 << 10 };

/* Factors of Adam: beta1, 1 - beta1, beta2, 1 - beta2, the square root of the second moment's bias
 * correction, epsilon, the first moment's bias correction, the learning rate, and the factor by
 * which weight decay multiplies the variable. */
enum { B1, REST1, B2, REST2, ROOT, EPSILON, BIAS, RATE, KEPT, ADAM_FACTORS };
enum { NEGATIVE_RATE, MOMENTUM, SGD_FACTORS };

#define RULES(T, root)                                                                             \
    static inline T adam_of_##T(T g, T *m, T *v, const T *c) {                                     \
        *m = *m * c[B1] + g * c[REST1];                                                            \
        *v = *v * c[B2] + g * g * c[REST2];                                                        \
        return *m / (root(*v) / c[ROOT] + c[EPSILON]) / c[BIAS];                                   \
    }                                                                                              \
    LOOPS static void adam_##T(void *const *arrays, size_t size, const double *factors) {          \
        T *g = arrays[0], *m = arrays[1], *v = arrays[2], *x = arrays[3], c[ADAM_FACTORS];         \
        for (int i = 0; i < ADAM_FACTORS; i++) c[i] = (T)factors[i];                               \
        EACH(size_t i = 0; i < size; i++) {                                                        \
            T step = adam_of_##T(g[i], m + i, v + i, c) * c[RATE];                                 \
            x[i] = x[i] * c[KEPT] - step;                                                          \
        }                                                                                          \
    }                                                                                              \
    LOOPS static void direction_##T(void *const *arrays, size_t size, const double *factors) {     \
        T *g = arrays[0], *m = arrays[1], *v = arrays[2], c[ADAM_FACTORS];                         \
        for (int i = 0; i < ADAM_FACTORS; i++) c[i] = (T)factors[i];                               \
        EACH(size_t i = 0; i < size; i++) g[i] = adam_of_##T(g[i], m + i, v + i, c);               \
    }                                                                                              \
    LOOPS static void sgd_##T(void *const *arrays, size_t size, const double *factors) {           \
        T *g = arrays[0], *x = arrays[1], *velocity = arrays[2];                                   \
        T down = (T)factors[NEGATIVE_RATE], momentum = (T)factors[MOMENTUM];                       \
        EACH(size_t i = 0; i < size; i++) {                                                        \
            velocity[i] = velocity[i] * momentum + g[i] * down;                                    \
            x[i] = x[i] + velocity[i];                                                             \
        }                                                                                          \
    }                                                                                              \
    LOOPS static void nesterov_##T(void *const *arrays, size_t size, const double *factors) {      \
        T *g = arrays[0], *x = arrays[1], *velocity = arrays[2];                                   \
        T down = (T)factors[NEGATIVE_RATE], momentum = (T)factors[MOMENTUM];                       \
        EACH(size_t i = 0; i < size; i++) {                                                        \
            T step = g[i] * down;                                                                  \
            velocity[i] = velocity[i] * momentum + step;                                           \
            x[i] = x[i] + (step + velocity[i] * momentum);                                         \
        }                                                                                          \
    }

RULES(float, sqrtf)
RULES(double, sqrt)

typedef void (*rule)(void *const *, size_t, const double *);

/* Return whether buffers have the same float type and length, are aligned, and do not overlap. */
static int fit(const Py_buffer *views, Py_ssize_t count) {
    char kind = views[0].format ? views[0].format[0] : 0;
    if (kind != 'f' && kind != 'd') return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Py_buffer *one = views + i;
        if (!one->format || one->format[0] != kind || one->format[1]) return 0;
        if (one->len != views[0].len || (uintptr_t)one->buf % (size_t)one->itemsize) return 0;
        for (Py_ssize_t j = 0; j < i; j++) {
            const char *low = views[j].buf, *high = one->buf;
            if (low < high + one->len && high < low + views[j].len) return 0;
        }
    }
    return 1;
}

/* Run the rule for float32 or float64 on a tuple of arrays; return False if they do not fit. */
static PyObject *run(PyObject *arrays, Py_ssize_t count, const rule *rules, const double *factors) {
    if (!PyTuple_Check(arrays) || PyTuple_Size(arrays) != count) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of %zd arrays", count);
        return NULL;
    }
    Py_buffer views[MOST_ARRAYS];
    void *data[MOST_ARRAYS];
    Py_ssize_t held = 0;
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE;
    while (held < count && !PyObject_GetBuffer(PyTuple_GetItem(arrays, held), views + held, flags))
        data[held] = views[held].buf, held++;
    /* Ignore errors: arrays that are not contiguous, or of other libraries, do not fit. */
    PyErr_Clear();
    int fits = held == count && fit(views, count);
    if (fits && views[0].len) {
        size_t size = (size_t)(views[0].len / views[0].itemsize);
        rule chosen = rules[views[0].itemsize == sizeof(double)];
        PyThreadState *state = size >= UNLOCKED_FROM ? PyEval_SaveThread() : NULL;
        chosen(data, size, factors);
        if (state) PyEval_RestoreThread(state);
    }
    while (held) PyBuffer_Release(views + --held);
    return PyBool_FromLong(fits);
}

static PyObject *adam(PyObject *Py_UNUSED(self), PyObject *args) {
    static const rule steps[] = {adam_float, adam_double};
    static const rule directions[] = {direction_float, direction_double};
    PyObject *arrays;
    double c[ADAM_FACTORS];
    if (!PyArg_ParseTuple(args, "O(ddddddddd)", &arrays, c + B1, c + REST1, c + B2, c + REST2,
                          c + ROOT, c + EPSILON, c + BIAS, c + RATE, c + KEPT))
        return NULL;
    int steps_too = PyTuple_Check(arrays) && PyTuple_Size(arrays) == 4;
    return run(arrays, steps_too ? 4 : 3, steps_too ? steps : directions, c);
}

static PyObject *sgd(PyObject *Py_UNUSED(self), PyObject *args) {
    static const rule plain[] = {sgd_float, sgd_double};
    static const rule ahead[] = {nesterov_float, nesterov_double};
    PyObject *arrays;
    double c[SGD_FACTORS];
    int nesterov;
    if (!PyArg_ParseTuple(args, "O(dd)p", &arrays, c + NEGATIVE_RATE, c + MOMENTUM, &nesterov))
        return NULL;
    return run(arrays, 3, nesterov ? ahead : plain, c);
}

static PyMethodDef methods[] = {
    {"adam", adam, METH_VARARGS,
     "adam((gradient, m, v[, value]), factors) -> bool. Update by Adam; without a value, put the "
     "step for a rate of 1 in the gradient's place."},
    {"sgd", sgd, METH_VARARGS,
     "sgd((gradient, value, velocity), (-rate, momentum), nesterov) -> bool. Update by momentum."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "update_rules", "Update rules in one pass.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_update_rules(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", 1)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
