/* Products for XLA and for Python: the handler of the call `podrun_product`, and functions of the module. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "product.h"
#include "python_buffers.h"
#include "xla_ffi.h"

enum { PRODUCT_NUMBERS = 8, OPERANDS = 5 };

/* A product from its numbers: its fields but the last, the parts, and last, if anything follows, what. */
static int
decode_product(const int64_t *numbers, size_t count, Product *p, int *parts)
{
    if (count != PRODUCT_NUMBERS && count != PRODUCT_NUMBERS + 1)
        return -1;
    for (size_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] > INT32_MAX)
            return -1;
    memcpy(p, numbers, (PRODUCT_NUMBERS - 1) * sizeof *numbers);
    p->follows = count > PRODUCT_NUMBERS ? numbers[PRODUCT_NUMBERS] : 0;
    *parts = (int)numbers[PRODUCT_NUMBERS - 1];
    return p->m && p->n && p->k && p->left_turned < 2 && p->right_turned < 2 && p->adds < 2 && p->place <= MOST_PLACES &&
                   p->follows < FOLLOWS && !(p->adds && p->follows)
               ? 0 : -1;
}

/* Elements of the operands, in order, and last of the result. Gives how many operands there are. */
static int
sizes_of_product(const Product *p, int64_t *sizes)
{
    int count = 2;
    sizes[0] = p->m * p->k;
    sizes[1] = p->k * p->n;
    if (p->adds)
        sizes[count++] = p->m * p->n;
    if (p->follows & WITH_BIAS)
        sizes[count++] = p->n;
    if (p->follows & WITH_MASK)
        sizes[count++] = p->m * p->n;
    sizes[count] = p->m * p->n;
    return count;
}

/* What it reads beside its first two operands. */
static Beside
beside_of(const Product *p, const float *const *operands)
{
    Beside beside = {0};
    int at = 2;
    if (p->adds)
        beside.addend = operands[at++];
    if (p->follows & WITH_BIAS)
        beside.bias = operands[at++];
    if (p->follows & WITH_MASK)
        beside.mask = operands[at];
    return beside;
}

/* The handler of the call `podrun_product`. */
static FfiError *
handle_product(FfiCall *call)
{
    if (call->extension)
        return described(call);
    const FfiArray *numbers = numbers_of(call);
    Product p;
    int parts;
    if (!numbers || decode_product(numbers->data, numbers->length, &p, &parts))
        return failed(call, FFI_INVALID, "podrun_product: its numbers describe no product");
    int64_t sizes[OPERANDS];
    const float *operands[OPERANDS] = {0};
    const int count = sizes_of_product(&p, sizes);
    if (call->arguments.count != count || call->results.count != 1)
        return failed(call, FFI_INVALID, "podrun_product: another number of operands than its numbers say");
    for (int i = 0; i <= count; i++) {
        const FfiBuffer *buffer = i < count ? call->arguments.values[i] : call->results.values[0];
        if (elements(buffer) != sizes[i])
            return failed(call, FFI_INVALID, "podrun_product: an operand or result of another size than its numbers say");
        operands[i] = buffer->data;
    }
    float *result = place_of(&p, (float *)operands[count]);
    const Beside beside = beside_of(&p, operands);
    const char *error = product_compute(&p, operands[0], operands[1], &beside, result, parts);
    return error ? failed(call, FFI_INTERNAL, error) : NULL;
}

/* --- Python -------------------------------------------------------------------------------------------------------- */

static PyObject *
product_handler(PyObject *module, PyObject *unused)
{
    return PyCapsule_New((void *)handle_product, NULL, NULL);
}

static PyObject *
multiply(PyObject *module, PyObject *args)
{
    PyObject *from, *given, *into;
    int64_t numbers[PRODUCT_NUMBERS + 1], sizes[OPERANDS];
    Product p;
    int parts, fits;
    Py_buffer views[OPERANDS];
    float *operands[OPERANDS] = {0};
    if (!PyArg_ParseTuple(args, "OO!O", &from, &PyTuple_Type, &given, &into))
        return NULL;
    const Py_ssize_t told = integers_of(from, numbers, PRODUCT_NUMBERS + 1);
    if (told < 0)
        return NULL;
    if (decode_product(numbers, (size_t)told, &p, &parts))
        return PyErr_Format(PyExc_ValueError, "these numbers describe no product");
    if (!is_loaded())
        return NULL;
    const int count = sizes_of_product(&p, sizes);
    const char *error = "another number of operands, or of their elements, than the numbers say";
    int held = hold_floats(given, into, sizes, count, -1, views, operands, &fits);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        const Beside beside = beside_of(&p, (const float *const *)operands);
        error = product_compute(&p, operands[0], operands[1], &beside, operands[count], parts);
        Py_END_ALLOW_THREADS
    }
    while (held)
        PyBuffer_Release(&views[--held]);
    if (error && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, error);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Places and the memory behind them, of a capsule. */
typedef struct {
    Places places;
    Py_buffer views[MOST_PLACES + 1];
} Held;
static const char HELD[] = "podrun.places";

static void
release(PyObject *capsule)
{
    Held *held = PyCapsule_GetPointer(capsule, HELD);
    for (int i = 0; held && i <= MOST_PLACES; i++)
        if (held->views[i].obj)
            PyBuffer_Release(&held->views[i]);
    free(held);
}

static PyObject *
places(PyObject *module, PyObject *memory)
{
    if (!PyDict_Check(memory))
        return PyErr_Format(PyExc_TypeError, "places are a dictionary of memory by number");
    Held *held = calloc(1, sizeof *held);
    PyObject *capsule = held ? PyCapsule_New(held, HELD, release) : PyErr_NoMemory(), *key, *value;
    if (!capsule)
        free(held);
    for (Py_ssize_t at = 0; capsule && PyDict_Next(memory, &at, &key, &value);) {
        const long i = PyLong_AsLong(key);
        if (!PyErr_Occurred() && (i < 1 || i > MOST_PLACES))
            PyErr_SetString(PyExc_ValueError, "there is no place of that number");
        if (PyErr_Occurred() || PyObject_GetBuffer(value, &held->views[i], PyBUF_WRITABLE)) {
            Py_CLEAR(capsule);
            break;
        }
        held->places.memory[i] = held->views[i].buf;
        held->places.elements[i] = held->views[i].len / (Py_ssize_t)sizeof(float);
    }
    return capsule;
}

static PyObject *
give_places(PyObject *module, PyObject *capsule)
{
    Held *held = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, HELD);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(places_give(held ? &held->places : NULL));
}

PyMethodDef product_functions[] = {
    {"product_handler", product_handler, METH_NOARGS, PyDoc_STR("The handler of XLA's calls of products.")},
    {"multiply", multiply, METH_VARARGS, PyDoc_STR("multiply(numbers, operands, result): one product on buffers of float32.")},
    {"places", places, METH_O, PyDoc_STR("Memory for results of products, by the number of their place.")},
    {"give_places", give_places, METH_O, PyDoc_STR("Give this thread's products places, None for none; a bit for each that was filled since the last call.")},
    {NULL, NULL, 0, NULL},
};
