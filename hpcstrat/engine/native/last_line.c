/* A last line of output, which a process prints when SIGTERM ends it.
 *
 * Launchers end ranks by SIGTERM if another rank was killed or the user has pressed Ctrl-C. The
 * text is in memory that the ranks of a host share, so that the handler needs no lock, no file and
 * no Python, and that only the first of these ranks prints it.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

/* The start of the shared memory: whether a rank has printed the text, its length, and the text. */
typedef struct {
    uint32_t printed, length;
    char text[];
} shared_line;

static Py_buffer memory;
static shared_line *volatile line;
static volatile pid_t owner;

static void print_once(void) {
    shared_line *found = line;
    if (!found || owner != getpid()) return;
    uint32_t length = __atomic_load_n(&found->length, __ATOMIC_ACQUIRE);
    if (!length || length > (size_t)memory.len - sizeof *found) return;
    if (__atomic_exchange_n(&found->printed, 1, __ATOMIC_ACQ_REL)) return;
    if (write(STDERR_FILENO, found->text, length) < 0) return;
}

static void on_signal(int number) {
    int kept = errno;
    print_once();
    errno = kept;
    /* SA_RESETHAND has restored the default action, which ends the process after the return. */
    raise(number);
}

static PyObject *prepare(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer given;
    if (!PyArg_ParseTuple(args, "w*", &given)) return NULL;
    if ((size_t)given.len < sizeof *line) {
        PyBuffer_Release(&given);
        PyErr_SetString(PyExc_ValueError, "expected more memory for the last line");
        return NULL;
    }
    line = NULL;
    if (memory.obj) PyBuffer_Release(&memory);
    memory = given;
    owner = getpid();
    line = given.buf;
    struct sigaction old, ours = {.sa_handler = on_signal, .sa_flags = SA_RESETHAND};
    /* Leave a handler of the program, or a signal that is ignored, as it is. */
    if (sigaction(SIGTERM, NULL, &old) == 0 && old.sa_handler == SIG_DFL)
        sigaction(SIGTERM, &ours, NULL);
    Py_RETURN_NONE;
}

static PyObject *print_line(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    print_once();
    Py_RETURN_NONE;
}

static PyObject *set_line(PyObject *self, PyObject *args) {
    (void)self;
    const char *text;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "y#", &text, &length)) return NULL;
    shared_line *found = line;
    if (found && length <= memory.len - (Py_ssize_t)sizeof *found) {
        /* A reader meanwhile sees no text. */
        __atomic_store_n(&found->length, 0, __ATOMIC_RELEASE);
        for (Py_ssize_t i = 0; i < length; i++) found->text[i] = text[i];
        __atomic_store_n(&found->length, (uint32_t)length, __ATOMIC_RELEASE);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS,
     "prepare(memory). Print the line in this memory, which ranks may share, on SIGTERM."},
    {"print_line", print_line, METH_NOARGS,
     "print_line(). Print the line now, unless a rank has printed it."},
    {"set_line", set_line, METH_VARARGS,
     "set_line(text). Set the line of all ranks that share the memory; one of them calls this."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "last_line", "A last line of output.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_last_line(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", 1)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
