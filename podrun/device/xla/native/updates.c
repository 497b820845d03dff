/* Sums of gradients and the update that follows, block by block: what a sum gives is still in the cache when the update
   reads it. An update is a list of steps, each of which computes a register from others, element by element.

   The order and rounding of every step are those of the piece that it stands for, which Python compares before it uses
   one. XLA takes denormal numbers as zero and gives none, the sum of gradients keeps them; so the processor's mode
   changes between the two. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "planes.h"
#include "processor_modes.h"

enum { BLOCK = 512, MOST_REGISTERS = 48, MOST_STEPS = 64, MOST_VIEWS = 512 };
enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, ROOT, NEGATE, MULTIPLY_ADD, SUBTRACT_PRODUCT, PRODUCT_LESS, KINDS };

typedef struct {
    int64_t kind, result, a, b, c;
} Step;

/* Registers: 0 has the sum, the next ones `vectors` in order, then `scalars`; steps may write any. */
typedef struct {
    Py_buffer views[MOST_VIEWS];
    int held;
    int64_t rows, vectors, scalars, steps, stores, elements;
    int mean;
    const float *row[MOST_VIEWS];
    float *vector[MOST_REGISTERS];
    const float *scalar[MOST_REGISTERS];
    Step step[MOST_STEPS];
    int64_t store[MOST_REGISTERS][2]; /* a register, and the vector that takes it */
} Update;

typedef float Vector __attribute__((vector_size(64)));

/* out = rows[0] + rows[1] + ..., in order, over the number of rows for the mean. Four vectors stay in registers. */
INLINE void
sum_rows(const float *const *rows, int64_t count, int64_t at, int64_t n, int mean, float *out)
{
    const float divisor = (float)count;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        Vector total[4], x;
        memcpy(total, rows[0] + at + i, sizeof total);
        for (int64_t k = 1; k < count; k++)
            for (int j = 0; j < 4; j++)
                memcpy(&x, rows[k] + at + i + 16 * j, sizeof x), total[j] += x;
        for (int j = 0; mean && j < 4; j++)
            total[j] /= divisor;
        memcpy(out + i, total, sizeof total);
    }
    for (; i < n; i++) {
        float total = rows[0][at + i];
        for (int64_t k = 1; k < count; k++)
            total += rows[k][at + i];
        out[i] = mean ? total / divisor : total;
    }
}

#define EACH(EXPRESSION)                                                                                               \
    _Pragma("GCC ivdep") for (int i = 0; i < BLOCK; i++) out[i] = (EXPRESSION);                                        \
    break

/* out may be an operand. */
INLINE void
take_step(int64_t kind, const float *a, const float *b, const float *c, float *out)
{
    switch (kind) {
    case ADD: EACH(a[i] + b[i]);
    case SUBTRACT: EACH(a[i] - b[i]);
    case MULTIPLY: EACH(a[i] * b[i]);
    case DIVIDE: EACH(a[i] / b[i]);
    case ROOT: EACH(__builtin_sqrtf(a[i]));
    case NEGATE: EACH(-a[i]);
    case MULTIPLY_ADD: EACH(__builtin_fmaf(a[i], b[i], c[i]));
    case SUBTRACT_PRODUCT: EACH(__builtin_fmaf(-a[i], b[i], c[i]));
    case PRODUCT_LESS: EACH(__builtin_fmaf(a[i], b[i], -c[i]));
    }
}

/* Each kind of processor has functions of its own, which are not inlined: nothing moves over a change of mode. */
#define FOR_PROCESSOR(NAME, FEATURES)                                                                                  \
    WITH(FEATURES) static void NAME##_sum(const Update *u, int64_t at, int64_t n, float *out)                          \
    {                                                                                                                  \
        sum_rows(u->row, u->rows, at, n, u->mean, out);                                                                \
    }                                                                                                                  \
    WITH(FEATURES) static void NAME##_step(int64_t kind, const float *a, const float *b, const float *c, float *out)   \
    {                                                                                                                  \
        take_step(kind, a, b, c, out);                                                                                 \
    }

FOR_PROCESSOR(plain, "sse2")
FOR_PROCESSOR(avx2, "avx2,fma")
FOR_PROCESSOR(avx512, "avx512f,fma")

static const struct Functions {
    void (*sum)(const Update *, int64_t, int64_t, float *);
    void (*step)(int64_t, const float *, const float *, const float *, float *);
} of_plain = {plain_sum, plain_step}, of_avx2 = {avx2_sum, avx2_step}, of_avx512 = {avx512_sum, avx512_step};

/* Those of the widest vectors that the processor has, or, once the library is loaded, that it keeps to: all give the same
   bits. */
static const struct Functions *
functions(void)
{
    const int lanes = vector_lanes();
    return lanes >= 16 ? &of_avx512 : lanes >= 8 ? &of_avx2 : &of_plain;
}

static void
run(const Update *u)
{
    float registers[MOST_REGISTERS][BLOCK] __attribute__((aligned(64)));
    const float *of[MOST_REGISTERS];
    const struct Functions *use = functions();
    const unsigned before = MODE(), flushing = before | FLUSHES;
    memset(registers, 0, sizeof registers);
    for (int i = 0; i < MOST_REGISTERS; i++)
        of[i] = registers[i];
    for (int64_t k = 0; k < u->scalars; k++)
        for (int i = 0; i < BLOCK; i++)
            registers[1 + u->vectors + k][i] = *u->scalar[k];
    for (int64_t at = 0; at < u->elements; at += BLOCK) {
        const int64_t n = u->elements - at < BLOCK ? u->elements - at : BLOCK;
        for (int64_t k = 0; k < u->vectors; k++) {
            of[1 + k] = n == BLOCK ? u->vector[k] + at : registers[1 + k];
            if (n < BLOCK)
                memcpy(registers[1 + k], u->vector[k] + at, (size_t)n * sizeof(float));
        }
        use->sum(u, at, n, registers[0]);
        SET_MODE(flushing);
        /* What the last step computes, it may write where it belongs: nothing reads the vector after it. */
        const int direct = n == BLOCK && u->steps && u->stores == 1 && u->store[0][0] == u->step[u->steps - 1].result;
        for (int64_t k = 0; k < u->steps; k++) {
            const Step *s = &u->step[k];
            float *out = direct && k == u->steps - 1 ? u->vector[u->store[0][1]] + at : registers[s->result];
            use->step(s->kind, of[s->a], of[s->b], of[s->c], out);
        }
        SET_MODE(before);
        for (int64_t k = 0; k < u->stores && !direct; k++)
            memcpy(u->vector[u->store[k][1]] + at, of[u->store[k][0]], (size_t)n * sizeof(float));
    }
}

/* --- Python -------------------------------------------------------------------------------------------------------- */

static const char NAME[] = "podrun.update";

static void
release(PyObject *capsule)
{
    Update *u = PyCapsule_GetPointer(capsule, NAME);
    while (u && u->held)
        PyBuffer_Release(&u->views[--u->held]);
    PyMem_Free(u);
}

/* The memory of the arrays of float32 in a list, of one size in bytes (-1: of any, which becomes it). How many there are,
   or -1. */
static int64_t
hold(Update *u, PyObject *list, int64_t most, Py_ssize_t *bytes, int writable, float **memory)
{
    const int64_t count = PyList_GET_SIZE(list);
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (count > most || u->held + count > MOST_VIEWS)
        return PyErr_Format(PyExc_ValueError, "too many arrays for an update"), -1;
    for (int64_t i = 0; i < count; i++) {
        Py_buffer *view = &u->views[u->held];
        if (PyObject_GetBuffer(PyList_GET_ITEM(list, i), view, flags))
            return -1;
        u->held++;
        if (!view->format || strcmp(view->format, "f"))
            return PyErr_Format(PyExc_ValueError, "arrays of an update are of float32"), -1;
        if (*bytes < 0)
            *bytes = view->len;
        if (view->len != *bytes || view->len % (Py_ssize_t)sizeof(float))
            return PyErr_Format(PyExc_ValueError, "arrays of an update differ in size"), -1;
        memory[i] = view->buf;
    }
    return count;
}

/* Whether all members of a list are tuples. */
static int
are_tuples(PyObject *list)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
        if (!PyTuple_Check(PyList_GET_ITEM(list, i)))
            return PyErr_Format(PyExc_TypeError, "steps and stores of an update are tuples"), 0;
    return 1;
}

/* Steps of five numbers each, and stores of two. */
static int
decode(Update *u, PyObject *steps, PyObject *stores)
{
    const int64_t first = 1 + u->vectors + u->scalars;
    if (!are_tuples(steps) || !are_tuples(stores))
        return -1;
    u->steps = PyList_GET_SIZE(steps), u->stores = PyList_GET_SIZE(stores);
    int fits = first <= MOST_REGISTERS && u->steps <= MOST_STEPS && u->stores <= MOST_REGISTERS;
    for (int64_t i = 0; fits && i < u->steps; i++) {
        Step *s = &u->step[i];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(steps, i), "LLLLL", &s->kind, &s->result, &s->a, &s->b, &s->c))
            return -1;
        fits = s->kind >= 0 && s->kind < KINDS && s->result >= first && s->result < MOST_REGISTERS && s->a >= 0 &&
               s->a < MOST_REGISTERS && s->b >= 0 && s->b < MOST_REGISTERS && s->c >= 0 && s->c < MOST_REGISTERS &&
               s->result != s->a && s->result != s->b && s->result != s->c;
    }
    for (int64_t i = 0; fits && i < u->stores; i++) {
        int64_t *store = u->store[i];
        if (!PyArg_ParseTuple(PyList_GET_ITEM(stores, i), "LL", &store[0], &store[1]))
            return -1;
        /* What another store writes is no longer what was read. */
        fits = store[1] >= 0 && store[1] < u->vectors && (!store[0] || (store[0] >= first && store[0] < MOST_REGISTERS));
    }
    return fits ? 0 : (PyErr_Format(PyExc_ValueError, "these numbers describe no update"), -1);
}

static PyObject *
update(PyObject *module, PyObject *args)
{
    PyObject *rows, *vectors, *scalars, *steps, *stores;
    int mean;
    if (!PyArg_ParseTuple(args, "O!pO!O!O!O!", &PyList_Type, &rows, &mean, &PyList_Type, &vectors, &PyList_Type, &scalars,
                          &PyList_Type, &steps, &PyList_Type, &stores))
        return NULL;
    Update *u = PyMem_Calloc(1, sizeof *u);
    PyObject *capsule = u ? PyCapsule_New(u, NAME, release) : PyErr_NoMemory();
    if (!capsule) {
        PyMem_Free(u);
        return NULL;
    }
    Py_ssize_t bytes = -1, one = sizeof(float);
    u->mean = mean;
    if ((u->rows = hold(u, rows, MOST_VIEWS, &bytes, 0, (float **)u->row)) > 0 &&
        (u->vectors = hold(u, vectors, MOST_REGISTERS, &bytes, 1, u->vector)) >= 0 &&
        (u->scalars = hold(u, scalars, MOST_REGISTERS, &one, 0, (float **)u->scalar)) >= 0 && !decode(u, steps, stores)) {
        u->elements = bytes / (Py_ssize_t)sizeof(float);
        return capsule;
    }
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "an update of no gradients");
    Py_DECREF(capsule);
    return NULL;
}

static PyObject *
run_update(PyObject *module, PyObject *capsule)
{
    const Update *u = PyCapsule_GetPointer(capsule, NAME);
    if (!u)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(u);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

PyMethodDef update_functions[] = {
    {"update", update, METH_VARARGS, PyDoc_STR("update(rows, mean, vectors, scalars, steps, stores): a prepared sum of rows and what follows it. Lists of buffers of float32; of tuples (kind, result, a, b, c) of registers; of (register, vector).")},
    {"run_update", run_update, METH_O, PyDoc_STR("Carry out a prepared update.")},
    {NULL, NULL, 0, NULL},
};
