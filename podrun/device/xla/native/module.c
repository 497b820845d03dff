/* The Python module `podrun.device.xla._onednn`: loads the library, computes on buffers, and gives XLA a handler. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "convolution.h"
#include "library.h"
#include "network.h"
#include "planes.h"
#include "plans.h"
#include "product.h"
#include "python_buffers.h"
#include "workers.h"
#include "xla_ffi.h"

enum { OPERANDS = 4 };
enum { WEIGHTS = 1 }; /* the operand of a forward one that may have room behind it, which is not read */

/* Elements of the operands, in order, and last of the result. Gives how many operands there are. */
static int
sizes_of(const Convolution *c, int64_t *sizes)
{
    const int64_t src = c->n * c->ih * c->iw * c->c, dst = c->n * c->oh * c->ow * c->m;
    const int64_t weights = c->m * (c->c / c->groups) * c->kh * c->kw;
    int count = 2;
    sizes[0] = c->kind == OF_SRC ? dst : src;
    sizes[1] = c->kind == OF_WEIGHTS ? dst : weights;
    if (c->follows & BIAS)
        sizes[count++] = c->m;
    if (c->follows & OTHER)
        sizes[count++] = dst;
    sizes[count] = c->kind == FORWARD ? dst : c->kind == OF_SRC ? src : weights;
    return count;
}

static Arrays
arrays_of(const Convolution *c, Manner manner, float *const *operands, float *result)
{
    Arrays a = {.packed = manner.packed};
    a.src = c->kind == OF_SRC ? result : operands[0];
    a.weights = c->kind == OF_WEIGHTS ? result : operands[1];
    a.dst = c->kind == FORWARD ? result : c->kind == OF_SRC ? operands[0] : operands[1];
    int at = 2;
    if (c->follows & BIAS)
        a.bias = operands[at++];
    if (c->follows & OTHER)
        a.other = operands[at];
    return a;
}

/* --- XLA ----------------------------------------------------------------------------------------------------------- */

/* The handler of the call `podrun_convolution`, whose attribute `numbers` says which. */
static FfiError *
handle(FfiCall *call)
{
    if (call->extension)
        return described(call);
    const FfiArray *numbers = numbers_of(call);
    Convolution c;
    Manner manner;
    if (!numbers || convolution_decode(numbers->data, numbers->length, &c, &manner))
        return failed(call, FFI_INVALID, "podrun_convolution: its numbers describe no convolution");
    int64_t sizes[OPERANDS + 1];
    float *operands[OPERANDS] = {0};
    const int count = sizes_of(&c, sizes);
    if (call->arguments.count != count || call->results.count != 1)
        return failed(call, FFI_INVALID, "podrun_convolution: another number of operands than its numbers say");
    for (int i = 0; i <= count; i++) {
        const FfiBuffer *buffer = i < count ? call->arguments.values[i] : call->results.values[0];
        const int64_t held = elements(buffer);
        if (i == WEIGHTS && c.kind == FORWARD ? held < sizes[i] : held != sizes[i])
            return failed(call, FFI_INVALID, "podrun_convolution: an operand or result of another size than its numbers say");
        if (i < count)
            operands[i] = buffer->data;
    }
    const Arrays arrays = arrays_of(&c, manner, operands, ((FfiBuffer *)call->results.values[0])->data);
    const char *error = convolution_compute(&c, &arrays, manner.parts);
    return error ? failed(call, FFI_INTERNAL, error) : NULL;
}

/* The handler of the call `podrun_network`, whose attribute `numbers` says which. */
static FfiError *
handle_network(FfiCall *call)
{
    if (call->extension)
        return described(call);
    const FfiArray *numbers = numbers_of(call);
    const char *error = "podrun_network: it has no numbers";
    if (!numbers)
        return failed(call, FFI_INVALID, error);
    Network *network = network_take(numbers->data, numbers->length, &error);
    if (!network)
        return failed(call, FFI_INVALID, error);
    const size_t operands = network_operands(network), all = operands + network_results(network);
    float **buffers = NULL;
    int code = FFI_INVALID;
    error = "podrun_network: other operands or results than its numbers say";
    if ((size_t)call->arguments.count != operands || (size_t)call->results.count != all - operands)
        goto end;
    if (!(buffers = malloc(all * sizeof *buffers)))
        goto end;
    for (size_t i = 0; i < all; i++) {
        const FfiBuffer *buffer = i < operands ? call->arguments.values[i] : call->results.values[i - operands];
        if (elements(buffer) < network_reach(network, i))
            goto end;
        buffers[i] = buffer->data;
    }
    code = FFI_INTERNAL;
    error = network_run(network, buffers);
end:
    free(buffers);
    network_give_back(network);
    return error ? failed(call, code, error) : NULL;
}

/* --- Python -------------------------------------------------------------------------------------------------------- */

static int
decode_python(PyObject *from, Convolution *c, Manner *manner)
{
    int64_t numbers[CONVOLUTION_NUMBERS];
    const Py_ssize_t count = integers_of(from, numbers, CONVOLUTION_NUMBERS);
    if (count < 0)
        return -1;
    if (convolution_decode(numbers, (size_t)count, c, manner)) {
        PyErr_SetString(PyExc_ValueError, "these numbers describe no convolution");
        return -1;
    }
    return is_loaded() ? 0 : -1;
}

/* Around a fork: networks hold plans, so theirs is the first lock. */
static void
hold(void)
{
    networks_hold();
    plans_hold();
}

static void
release(void)
{
    plans_release();
    networks_release();
}

static PyObject *
load(PyObject *module, PyObject *path)
{
    static int loaded;
    const char *text = PyUnicode_AsUTF8(path);
    if (!text || loaded)
        return text ? Py_NewRef(Py_None) : NULL;
    const char *error = library_load(text);
    if (error)
        return PyErr_Format(PyExc_OSError, "%s", error);
    loaded = 1;
    workers_start(hold, release);
    planes_vectors(MOST_LANES);
    return PyModule_AddIntConstant(module, "PLANES", planes_can() ? MOST_PLANES : 0) ? NULL : Py_NewRef(Py_None);
}

static PyObject *
vectors(PyObject *module, PyObject *most)
{
    const long lanes = PyLong_AsLong(most);
    if (PyErr_Occurred() || !is_loaded())
        return NULL;
    product_forget();
    return PyLong_FromLong(planes_vectors(lanes < MOST_LANES ? (int)lanes : MOST_LANES));
}

static PyObject *
level(PyObject *module, PyObject *most)
{
    const long wanted = PyLong_AsLong(most);
    if (PyErr_Occurred())
        return NULL;
    limit_instructions(wanted < 0 ? 0 : wanted < LEVELS ? (int)wanted : LEVELS);
    return PyLong_FromLong(instruction_level());
}

static PyObject *
guard(PyObject *module, PyObject *unused)
{
    scratch_guard();
    return Py_NewRef(Py_None);
}

static PyObject *
handler(PyObject *module, PyObject *unused)
{
    return PyCapsule_New((void *)handle, NULL, NULL);
}

static PyObject *
network_handler(PyObject *module, PyObject *unused)
{
    return PyCapsule_New((void *)handle_network, NULL, NULL);
}

static PyObject *
prepare(PyObject *module, PyObject *from)
{
    Convolution c;
    Manner manner;
    char names[200] = "";
    if (decode_python(from, &c, &manner))
        return NULL;
    const char *error;
    Py_BEGIN_ALLOW_THREADS
    error = convolution_prepare(&c, manner.parts, names, sizeof names);
    Py_END_ALLOW_THREADS
    return error ? PyErr_Format(PyExc_ValueError, "%s", error) : PyUnicode_FromString(names);
}

static PyObject *
compute(PyObject *module, PyObject *args)
{
    PyObject *from, *given, *into;
    Convolution c;
    Manner manner;
    int fits;
    int64_t sizes[OPERANDS + 1];
    Py_buffer views[OPERANDS + 1];
    float *memory[OPERANDS + 1] = {0};
    if (!PyArg_ParseTuple(args, "OO!O", &from, &PyTuple_Type, &given, &into) || decode_python(from, &c, &manner))
        return NULL;
    const int count = sizes_of(&c, sizes);
    const char *error = "another number of operands, or of their elements, than the numbers say";
    int held = hold_floats(given, into, sizes, count, c.kind == FORWARD ? WEIGHTS : -1, views, memory, &fits);
    if (fits) {
        const Arrays arrays = arrays_of(&c, manner, memory, memory[count]);
        Py_BEGIN_ALLOW_THREADS
        error = convolution_compute(&c, &arrays, manner.parts);
        Py_END_ALLOW_THREADS
    }
    while (held)
        PyBuffer_Release(&views[--held]);
    if (error && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, error);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *
pack(PyObject *module, PyObject *args)
{
    PyObject *from, *given, *into;
    Convolution c;
    Manner manner;
    Py_buffer weights, packed;
    int64_t sizes[OPERANDS + 1];
    if (!PyArg_ParseTuple(args, "OOO", &from, &given, &into) || decode_python(from, &c, &manner))
        return NULL;
    if (PyObject_GetBuffer(given, &weights, PyBUF_SIMPLE))
        return NULL;
    if (PyObject_GetBuffer(into, &packed, PyBUF_WRITABLE)) {
        PyBuffer_Release(&weights);
        return NULL;
    }
    sizes_of(&c, sizes);
    const char *error = "packed are the weights of a forward convolution";
    if (c.kind == FORWARD && weights.len == sizes[WEIGHTS] * (Py_ssize_t)sizeof(float)) {
        Py_BEGIN_ALLOW_THREADS
        error = convolution_pack(&c, manner.parts, weights.buf, packed.buf, (size_t)packed.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&weights);
    return error ? PyErr_Format(PyExc_ValueError, "%s", error) : Py_NewRef(Py_None);
}

/* The buffers of a tuple or list, as so many floats as the network reaches at least. How many are held, -1 if one does not fit. */
static Py_ssize_t
hold_buffers(const Network *network, PyObject *items, size_t first, int writable, Py_buffer *views, float **buffers)
{
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); i++) {
        Py_buffer *view = &views[first + (size_t)i];
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(items, i), view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            return i;
        buffers[first + (size_t)i] = view->buf;
        if (view->len / (Py_ssize_t)sizeof(float) < network_reach(network, first + (size_t)i)) {
            PyErr_SetString(PyExc_ValueError, "an operand or result is smaller than the network's numbers say");
            return i + 1;
        }
    }
    return PySequence_Fast_GET_SIZE(items);
}

static PyObject *
network(PyObject *module, PyObject *args)
{
    Py_buffer numbers, *views = NULL;
    PyObject *operands, *results;
    float **buffers = NULL;
    Py_ssize_t held = 0;
    const char *error = "these numbers describe no network";
    if (!is_loaded() || !PyArg_ParseTuple(args, "y*O!O!", &numbers, &PyTuple_Type, &operands, &PyTuple_Type, &results))
        return NULL;
    Network *taken;
    Py_BEGIN_ALLOW_THREADS /* it may make plans, for a tenth of a second and more */
    taken = network_take(numbers.buf, (size_t)numbers.len / sizeof(int64_t), &error);
    Py_END_ALLOW_THREADS
    const size_t first = taken ? network_operands(taken) : 0, all = taken ? first + network_results(taken) : 0;
    if (taken && ((size_t)PyTuple_GET_SIZE(operands) != first || (size_t)PyTuple_GET_SIZE(results) != all - first))
        error = "another number of operands or results than the network's numbers say";
    else if (taken && (views = calloc(all, sizeof *views)) && (buffers = calloc(all, sizeof *buffers))) {
        held = hold_buffers(taken, operands, 0, 0, views, buffers);
        if (!PyErr_Occurred())
            held += hold_buffers(taken, results, first, 1, views, buffers);
        if (!PyErr_Occurred()) {
            Py_BEGIN_ALLOW_THREADS
            error = network_run(taken, buffers);
            Py_END_ALLOW_THREADS
        }
    }
    while (held)
        PyBuffer_Release(&views[--held]);
    free(views);
    free(buffers);
    if (taken)
        network_give_back(taken);
    PyBuffer_Release(&numbers);
    if (error && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, error);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

enum { FORM = 10 }; /* of the numbers of all calls: `convolutions.FORM`, which another module is compared with */

static PyMethodDef functions[] = {
    {"load", load, METH_O, PyDoc_STR("Load the library from a path. OSError says why not.")},
    {"guard", guard, METH_NOARGS, PyDoc_STR("Before the first plan, for tests: a crash where the library leaves its scratch memory.")},
    {"vectors", vectors, METH_O, PyDoc_STR("While nothing computes, for tests: have first layers use vectors of so many elements at most; how many they had.")},
    {"instruction_level", level, METH_O, PyDoc_STR("While nothing computes, for tests: round and draw with instructions of this level at most (0: any processor's, 1: AVX2, 2: AVX-512); the level that is used.")},
    {"handler", handler, METH_NOARGS, PyDoc_STR("The handler of XLA's calls, for `jax.ffi.register_ffi_target`.")},
    {"network_handler", network_handler, METH_NOARGS, PyDoc_STR("The handler of XLA's calls of networks.")},
    {"prepare", prepare, METH_O, PyDoc_STR("Make what a convolution takes; the names of its algorithms. ValueError if there are none.")},
    {"compute", compute, METH_VARARGS, PyDoc_STR("compute(numbers, operands, result): one convolution on buffers of float32.")},
    {"network", network, METH_VARARGS, PyDoc_STR("network(numbers, operands, results): a chain of layers on tuples of buffers of float32; numbers: a buffer of int64.")},
    {"pack", pack, METH_VARARGS, PyDoc_STR("pack(numbers, weights, result): weights in the library's order, in a result that is large enough. ValueError if they stay as they are.")},
    {NULL, NULL, 0, NULL},
};

extern PyMethodDef product_functions[]; /* product_calls.c */
extern PyMethodDef update_functions[];  /* updates.c */
extern PyMethodDef dense_functions[];   /* dense.c */
extern PyMethodDef rounding_functions[]; /* rounding.c */
extern PyMethodDef random_words_functions[]; /* random_words.c */

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "podrun.device.xla._onednn",
    .m_doc = PyDoc_STR("Convolutions by oneDNN, on threads of podrun's own."),
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__onednn(void)
{
    PyObject *made = PyModule_Create(&definition);
    if (made && (PyModule_AddFunctions(made, product_functions) || PyModule_AddFunctions(made, update_functions) ||
                 PyModule_AddFunctions(made, dense_functions) || PyModule_AddFunctions(made, rounding_functions) ||
                 PyModule_AddFunctions(made, random_words_functions)))
        Py_CLEAR(made);
    const struct {
        const char *name;
        long value;
    } constants[] = {{"STEPS", STEPS}, {"FOLLOWS", FOLLOWS}, {"FORM", FORM}};
    for (size_t i = 0; made && i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(made, constants[i].name, constants[i].value))
            Py_CLEAR(made);
    return made;
}
