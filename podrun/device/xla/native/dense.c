/* Runs a training step of a dense network, which is a list of steps over buffers: operands, results, and last an arena of its
   own. See dense.h.

   Numbers of a program: operands, results, elements of the arena, constants, steps; elements of each operand and result; of each
   constant its place in the arena and its bits; of each step its kind, how many numbers follow, and these. A place is two
   numbers, a buffer and an element in it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "dense.h"
#include "planes.h"
#include "plans.h"
#include "product.h"
#include "python_buffers.h"

enum { AXES = 4, MOST_READ = 3, MOST_DENSE = 4096, MOST_BUFFERS = 512 };

typedef struct {
    int64_t buffer, element;
} Place;

typedef struct {
    Place at;
    int64_t step[AXES]; /* elements between neighbours along each axis */
} Read;

typedef struct {
    int64_t kind, operation, reads, elements;
    int64_t sizes[AXES]; /* MAP: of its axes; others: see `decode_step` */
    Read read[MOST_READ + 1];
    Place to;
    Product product;
    int parts;
} DenseStep;

typedef struct {
    int64_t operands, results, arena, constants, steps;
    int64_t length[MOST_BUFFERS]; /* elements of each buffer */
    int64_t (*constant)[2];
    DenseStep *step;
    float *spare; /* an arena that no thread uses */
} Dense;

/* --- Reading the numbers ---------------------------------------------------------------------------------------------- */

typedef struct {
    const int64_t *next;
    int64_t left;
} Numbers;

static int64_t
take(Numbers *n)
{
    return n->left-- > 0 ? *n->next++ : -1;
}

/* Whether so many elements from a place on are inside of its buffer; a place that is written is no operand. */
static int
inside(const Dense *d, Place at, int64_t elements, int written)
{
    const int64_t buffers = d->operands + d->results + 1;
    return at.buffer >= (written ? d->operands : 0) && at.buffer < buffers && at.element >= 0 && elements > 0 &&
           elements <= d->length[at.buffer] && at.element <= d->length[at.buffer] - elements;
}

static int
take_place(const Dense *d, Numbers *n, Place *at, int64_t elements, int written)
{
    at->buffer = take(n), at->element = take(n);
    return inside(d, *at, elements, written);
}

static int
small(int64_t size)
{
    return size > 0 && size <= INT32_MAX;
}

static int
decode_map(const Dense *d, Numbers *n, DenseStep *s)
{
    static const int8_t reads[DENSE_OPERATIONS] = {
        [D_COPY] = 1, [D_NEGATE] = 1, [D_EXPONENTIAL] = 1, [D_LOG] = 1, [D_SQRT] = 1, [D_TANH] = 1, [D_LOGISTIC] = 1,
        [D_FLOAT] = 1, [D_NOT] = 1, [D_SELECT] = 3};
    s->operation = take(n);
    if (s->operation < 0 || s->operation >= DENSE_OPERATIONS)
        return 0;
    s->reads = reads[s->operation] ? reads[s->operation] : 2;
    s->elements = 1;
    for (int i = 0; i < AXES; i++) {
        s->sizes[i] = take(n);
        if (!small(s->sizes[i]) || s->elements > INT32_MAX / s->sizes[i])
            return 0;
        s->elements *= s->sizes[i];
    }
    for (int k = 0; k < s->reads; k++) {
        Read *r = &s->read[k];
        r->at.buffer = take(n), r->at.element = take(n);
        int64_t last = 0;
        for (int i = 0; i < AXES; i++) {
            r->step[i] = take(n);
            if (r->step[i] < 0 || r->step[i] > INT32_MAX)
                return 0;
            last += (s->sizes[i] - 1) * r->step[i];
        }
        if (!inside(d, r->at, last + 1, 0))
            return 0;
    }
    return take_place(d, n, &s->to, s->elements, 1);
}

/* Numbers as of the call `podrun_product` with what follows, without a sum or a place; then the places. */
static int
decode_dense_product(const Dense *d, Numbers *n, DenseStep *s)
{
    Product *p = &s->product;
    p->left_turned = take(n), p->right_turned = take(n), p->m = take(n), p->n = take(n), p->k = take(n);
    s->parts = take(n) > 1 ? 2 : 1, p->follows = take(n);
    if (p->left_turned < 0 || p->left_turned > 1 || p->right_turned < 0 || p->right_turned > 1 || !small(p->m) || !small(p->n) ||
        !small(p->k) || p->follows < 0 || p->follows >= FOLLOWS)
        return 0;
    return take_place(d, n, &s->read[0].at, p->m * p->k, 0) && take_place(d, n, &s->read[1].at, p->k * p->n, 0) &&
           (!(p->follows & WITH_BIAS) || take_place(d, n, &s->read[2].at, p->n, 0)) &&
           (!(p->follows & WITH_MASK) || take_place(d, n, &s->read[3].at, p->m * p->n, 0)) &&
           take_place(d, n, &s->to, p->m * p->n, 1);
}

static int
decode_step(const Dense *d, Numbers *n, DenseStep *s)
{
    int64_t *z = s->sizes;
    switch (s->kind) {
    case MAP: return decode_map(d, n, s);
    case PRODUCT: return decode_dense_product(d, n, s);
    case REDUCE: /* sizes: outer, count, inner */
        s->operation = take(n);
        z[0] = take(n), z[1] = take(n), z[2] = take(n);
        return s->operation >= 0 && s->operation < DENSE_REDUCTIONS && small(z[0]) && small(z[1]) && small(z[2]) &&
               z[0] <= INT32_MAX / z[1] && z[0] * z[1] <= INT32_MAX / z[2] &&
               take_place(d, n, &s->read[0].at, z[0] * z[1] * z[2], 0) && take_place(d, n, &s->to, z[0] * z[2], 1);
    case PICK:   /* sizes: rows, width, count; dst [rows, count] = src [rows, width] where index [rows, count] says */
    case ADD_AT: /* to dst [rows, width], which has values, of src [rows, count] */
        z[0] = take(n), z[1] = take(n), z[2] = take(n);
        if (!small(z[0]) || !small(z[1]) || !small(z[2]) || z[0] > INT32_MAX / z[1] || z[0] > INT32_MAX / z[2])
            return 0;
        return take_place(d, n, &s->read[0].at, z[0] * (s->kind == PICK ? z[1] : z[2]), 0) &&
               take_place(d, n, &s->read[1].at, z[0] * z[2], 0) &&
               take_place(d, n, &s->to, z[0] * (s->kind == PICK ? z[2] : z[1]), 1);
    case COUNT_UP: /* 0, 1, 2 ... */
        z[0] = take(n);
        return small(z[0]) && take_place(d, n, &s->to, z[0], 1);
    }
    return 0;
}

static int
decode_dense(Dense *d, Numbers n)
{
    d->operands = take(&n), d->results = take(&n), d->arena = take(&n), d->constants = take(&n), d->steps = take(&n);
    if (d->operands < 0 || d->results < 0 || d->operands > MOST_BUFFERS || d->results > MOST_BUFFERS ||
        d->operands + d->results >= MOST_BUFFERS || !small(d->arena + 1) || d->constants < 0 || d->constants > MOST_DENSE ||
        d->steps < 1 || d->steps > MOST_DENSE)
        return 0;
    for (int64_t i = 0; i < d->operands + d->results; i++)
        if (!small((d->length[i] = take(&n))))
            return 0;
    const int64_t arena = d->operands + d->results;
    d->length[arena] = d->arena;
    d->constant = calloc((size_t)d->constants + 1, sizeof *d->constant);
    d->step = calloc((size_t)d->steps, sizeof *d->step);
    if (!d->constant || !d->step)
        return 0;
    for (int64_t i = 0; i < d->constants; i++) {
        d->constant[i][0] = take(&n), d->constant[i][1] = take(&n);
        if (!inside(d, (Place){arena, d->constant[i][0]}, 1, 1))
            return 0;
    }
    for (int64_t i = 0; i < d->steps; i++) {
        d->step[i].kind = take(&n);
        const int64_t count = take(&n);
        Numbers body = {n.next, count};
        if (body.left < 0 || body.left > n.left)
            return 0;
        n.next += body.left, n.left -= body.left;
        if (!decode_step(d, &body, &d->step[i]) || body.left)
            return 0;
    }
    return !n.left;
}

/* --- Computing -------------------------------------------------------------------------------------------------------- */

/* Elements of an operand of MAP from one of the result's on, in order. */
static void
gather(const float *from, const DenseStep *s, const int64_t *step, int64_t first, int64_t count, float *into)
{
    int64_t at[AXES], rest = first;
    for (int i = AXES - 1; i >= 0; i--)
        at[i] = rest % s->sizes[i], rest /= s->sizes[i];
    while (count > 0) {
        int64_t n = s->sizes[3] - at[3];
        n = n < count ? n : count;
        const float *row = from + at[0] * step[0] + at[1] * step[1] + at[2] * step[2] + at[3] * step[3];
        for (int64_t i = 0; i < n; i++)
            into[i] = row[i * step[3]];
        into += n, count -= n, at[3] = 0;
        for (int i = 2; i >= 0 && ++at[i] == s->sizes[i]; i--)
            at[i] = 0;
    }
}

static void
run_map(const DenseStep *s, float *const *buffers, const DenseKernels *use)
{
    float room[MOST_READ][DENSE_BLOCK] __attribute__((aligned(64)));
    const float *from[MOST_READ] = {0}, *of[MOST_READ] = {0};
    int dense[MOST_READ] = {0}, one[MOST_READ] = {0};
    for (int k = 0; k < s->reads; k++) {
        const int64_t *step = s->read[k].step;
        from[k] = buffers[s->read[k].at.buffer] + s->read[k].at.element;
        dense[k] = one[k] = 1;
        int64_t next = 1;
        for (int i = AXES - 1; i >= 0; next *= s->sizes[i--])
            dense[k] &= s->sizes[i] == 1 || step[i] == next, one[k] &= s->sizes[i] == 1 || !step[i];
        for (int64_t i = 0; one[k] && i < DENSE_BLOCK && i < s->elements; i++)
            room[k][i] = *from[k];
    }
    float *to = buffers[s->to.buffer] + s->to.element;
    for (int64_t at = 0; at < s->elements; at += DENSE_BLOCK) {
        const int64_t n = s->elements - at < DENSE_BLOCK ? s->elements - at : DENSE_BLOCK;
        for (int k = 0; k < s->reads; k++) {
            of[k] = dense[k] && !one[k] ? from[k] + at : room[k];
            if (!dense[k] && !one[k])
                gather(from[k], s, s->read[k].step, at, n, room[k]);
        }
        use->map(s->operation, of[0], of[1], of[2], to + at, n);
    }
}

/* XLA's gather takes the nearest element for an index outside; its scatter leaves such an addend out. */
static void
run_at_index(const DenseStep *s, const float *src, const int32_t *index, float *to)
{
    const int64_t rows = s->sizes[0], width = s->sizes[1], count = s->sizes[2];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < count; k++) {
            const int64_t i = index[r * count + k];
            if (s->kind == PICK)
                to[r * count + k] = src[r * width + (i < 0 ? 0 : i >= width ? width - 1 : i)];
            else if (i >= 0 && i < width)
                to[r * width + i] += src[r * count + k];
        }
}

static const char *
run_step(const DenseStep *s, float *const *buffers, const DenseKernels *use)
{
    float *to = buffers[s->to.buffer] + s->to.element;
    const float *read[MOST_READ + 1];
    for (int k = 0; k <= MOST_READ; k++)
        read[k] = buffers[s->read[k].at.buffer] + s->read[k].at.element;
    switch (s->kind) {
    case MAP: run_map(s, buffers, use); break;
    case REDUCE: use->reduce(s->operation, read[0], s->sizes[0], s->sizes[1], s->sizes[2], to); break;
    case PRODUCT: {
        const Beside beside = {.bias = s->product.follows & WITH_BIAS ? read[2] : NULL,
                               .mask = s->product.follows & WITH_MASK ? read[3] : NULL};
        return product_compute(&s->product, read[0], read[1], &beside, to, s->parts);
    }
    case COUNT_UP:
        for (int64_t i = 0; i < s->sizes[0]; i++)
            ((int32_t *)to)[i] = (int32_t)i;
        break;
    default: run_at_index(s, read[0], (const int32_t *)read[1], to);
    }
    return NULL;
}

static const char *
run_dense_steps(Dense *d, float **buffers)
{
    const DenseKernels *use = dense_kernels(vector_lanes());
    float *arena = __atomic_exchange_n(&d->spare, NULL, __ATOMIC_ACQ_REL);
    if (!arena && posix_memalign((void **)&arena, 64, ((size_t)d->arena + 16) * sizeof *arena))
        return "no memory for a dense step";
    const char *error = NULL;
    buffers[d->operands + d->results] = arena;
    const Before before = plan_enter();
    for (int64_t i = 0; i < d->constants; i++) {
        const int32_t bits = (int32_t)d->constant[i][1];
        memcpy(arena + d->constant[i][0], &bits, sizeof bits);
    }
    for (int64_t i = 0; i < d->steps && !error; i++)
        error = run_step(&d->step[i], buffers, use);
    plan_leave(before);
    free(__atomic_exchange_n(&d->spare, arena, __ATOMIC_ACQ_REL));
    return error;
}

/* --- Python ----------------------------------------------------------------------------------------------------------- */

static const char NAME[] = "podrun.dense";

static void
release(PyObject *capsule)
{
    Dense *d = PyCapsule_GetPointer(capsule, NAME);
    free(d->constant);
    free(d->step);
    free(d->spare);
    free(d);
}

static PyObject *
dense(PyObject *module, PyObject *from)
{
    Py_buffer numbers;
    if (!is_loaded() || PyObject_GetBuffer(from, &numbers, PyBUF_C_CONTIGUOUS))
        return NULL;
    Dense *d = calloc(1, sizeof *d);
    PyObject *capsule = d ? PyCapsule_New(d, NAME, release) : PyErr_NoMemory();
    if (!capsule)
        free(d);
    else if (!decode_dense(d, (Numbers){numbers.buf, numbers.len / (Py_ssize_t)sizeof(int64_t)})) {
        PyErr_SetString(PyExc_ValueError, "these numbers describe no dense step");
        Py_CLEAR(capsule);
    }
    PyBuffer_Release(&numbers);
    return capsule;
}

static PyObject *
run_dense(PyObject *module, PyObject *args)
{
    PyObject *capsule, *operands, *results;
    Py_buffer views[MOST_BUFFERS];
    float *buffers[MOST_BUFFERS];
    if (!PyArg_ParseTuple(args, "OO!O!", &capsule, &PyTuple_Type, &operands, &PyTuple_Type, &results))
        return NULL;
    Dense *d = PyCapsule_GetPointer(capsule, NAME);
    if (!d)
        return NULL;
    const char *error = NULL;
    int64_t held = 0, all = d->operands + d->results;
    if (PyTuple_GET_SIZE(operands) != d->operands || PyTuple_GET_SIZE(results) != d->results)
        error = "another number of operands or results than the numbers say";
    for (; !error && held < all; held++) {
        const int written = held >= d->operands;
        PyObject *item = written ? PyTuple_GET_ITEM(results, held - d->operands) : PyTuple_GET_ITEM(operands, held);
        if (PyObject_GetBuffer(item, &views[held], written ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            break;
        buffers[held] = views[held].buf;
        if (views[held].len != d->length[held] * (Py_ssize_t)sizeof(float))
            error = "an operand or result of another size than the numbers say";
    }
    if (!error && held == all) {
        Py_BEGIN_ALLOW_THREADS
        error = run_dense_steps(d, buffers);
        Py_END_ALLOW_THREADS
    }
    while (held)
        PyBuffer_Release(&views[--held]);
    if (error && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, error);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyMethodDef dense_functions[] = {
    {"dense", dense, METH_O, PyDoc_STR("dense(numbers): a training step of a dense network, from a buffer of int64.")},
    {"run_dense", run_dense, METH_VARARGS, PyDoc_STR("run_dense(step, operands, results): carry one out on tuples of buffers.")},
    {NULL, NULL, 0, NULL},
};
