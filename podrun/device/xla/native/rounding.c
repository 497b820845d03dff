/* Stochastic rounding onto the halves: the handler of the call `podrun_rounding`.

   The same bits as the formula of `podrun/compiler/grid_rounding.py`, which XLA compiles where this module is missing. Both
   take denormal numbers as zero. A division by a power of two is a multiplication here, which gives the same. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "planes.h"
#include "processor_modes.h"
#include "workers.h"
#include "xla_ffi.h"

enum { NUMBERS = 3, OPERANDS = 3, WORDS = 2, LEVELS = 3, PART = 1 << 16 };

INLINE uint32_t
mixed(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* Elements from `first` to `end` of what one state rounds. `out` may be `in`. */
INLINE void
round_elements(const uint32_t *in, uint32_t *out, int64_t first, int64_t end, uint32_t low, uint32_t high)
{
#pragma GCC ivdep
    for (int64_t i = first; i < end; i++) {
        const uint32_t bits = in[i], field = (bits >> 23) & 255;
        const int32_t hash = (int32_t)(mixed(mixed((uint32_t)i ^ low) + high) >> 8);
        const int32_t exponent = field > 113 ? (int32_t)field : 113; /* 2**-14: denormal halves have its step */
        union {
            uint32_t bits;
            float value;
        } value = {bits}, step = {(uint32_t)(exponent - 10) << 23}, inverse = {(uint32_t)(264 - exponent) << 23}, made;
        const float place = value.value * inverse.value + (float)hash * 0x1p-24f; /* below 2**12 in size */
        float whole = (float)(int32_t)place;
        whole -= whole > place ? 1.0f : 0.0f;
        made.value = whole * step.value;
        const uint32_t infinite = (bits & 0x80000000u) | 0x7F800000u;
        const uint32_t finite = (made.bits & 0x7FFFFFFFu) >= 0x47800000u ? infinite : made.bits; /* 65536 and more */
        const uint32_t nan = (bits & 0xFFFFE000u) | 0x00400000u;
        out[i] = field < 255 ? finite : bits << 9 ? nan : bits;
    }
}

/* Each kind of processor has a function of its own, which is not inlined: nothing moves over a change of mode. */
#define FOR_PROCESSOR(NAME, FEATURES)                                                                                  \
    WITH(FEATURES) static void NAME(const uint32_t *in, uint32_t *out, int64_t first, int64_t end, uint32_t low,       \
                                    uint32_t high)                                                                     \
    {                                                                                                                  \
        round_elements(in, out, first, end, low, high);                                                                \
    }

FOR_PROCESSOR(on_any, "sse2")
FOR_PROCESSOR(on_avx2, "avx2")
FOR_PROCESSOR(on_avx512, "avx512f,avx512bw,avx512dq,avx512vl")

static void (*const functions[LEVELS])(const uint32_t *, uint32_t *, int64_t, int64_t, uint32_t, uint32_t) = {
    on_any, on_avx2, on_avx512};
static int most_level = LEVELS - 1;

static int
level(void)
{
    const int lanes = vector_lanes(), can = lanes >= 16 ? 2 : lanes >= 8 ? 1 : 0;
    return can < most_level ? can : most_level;
}

/* Values of `count` states, `each` for one of them; the states lie `stride` words apart. */
typedef struct {
    const uint32_t *in, *states;
    uint32_t *out;
    int64_t each, count, stride;
} Rounding;

/* Part i of all elements of all states, end to end. */
static void
round_part(void *what, int i)
{
    const Rounding *r = what;
    const unsigned before = MODE();
    const int64_t all = r->each * r->count, start = (int64_t)i * PART, stop = all - start < PART ? all : start + PART;
    const int use = level();
    SET_MODE(before | FLUSHES);
    for (int64_t at = start; at < stop;) {
        const int64_t state = at / r->each, offset = state * r->each, end = offset + r->each < stop ? offset + r->each : stop;
        const uint32_t *words = r->states + state * r->stride;
        functions[use](r->in + offset, r->out + offset, at - offset, end - offset, words[0], words[1]);
        at = end;
    }
    SET_MODE(before);
}

static int64_t
elements_of(const FfiBuffer *buffer, int type)
{
    int64_t count = buffer->type == type ? 1 : -1;
    for (int64_t i = 0; i < buffer->rank; i++)
        count *= buffer->dims[i];
    return count;
}

/* Its numbers: elements for one state, tables of states, rows of each. A row outside of them is the nearest. */
static FfiError *
handle_rounding(FfiCall *call)
{
    if (call->extension)
        return described(call);
    const FfiArray *numbers = numbers_of(call);
    const int64_t *n = numbers && numbers->length == NUMBERS ? numbers->data : NULL;
    int fits = n && call->arguments.count == OPERANDS && call->results.count == 1;
    for (int i = 0; fits && i < NUMBERS; i++)
        fits = n[i] > 0 && n[i] <= INT32_MAX;
    if (!fits || n[0] * n[1] > INT32_MAX)
        return failed(call, FFI_INVALID, "podrun_rounding: its numbers describe no rounding");
    const FfiBuffer *in = call->arguments.values[0], *states = call->arguments.values[1], *row = call->arguments.values[2];
    const FfiBuffer *out = call->results.values[0];
    const int64_t all = n[0] * n[1];
    if (elements(in) != all || elements(out) != all || elements_of(row, FFI_S32) != 1 ||
        elements_of(states, FFI_U32) != n[1] * n[2] * WORDS)
        return failed(call, FFI_INVALID, "podrun_rounding: an operand or result of another size than its numbers say");
    const int64_t wanted = *(const int32_t *)row->data, at = wanted < 0 ? 0 : wanted < n[2] ? wanted : n[2] - 1;
    Rounding r = {in->data, (const uint32_t *)states->data + at * WORDS, out->data, n[0], n[1], n[2] * WORDS};
    const int64_t parts = (all + PART - 1) / PART;
    if (parts == 1)
        round_part(&r, 0);
    else
        workers_run(round_part, &r, (int)parts);
    return NULL;
}

static PyObject *
rounding_handler(PyObject *module, PyObject *unused)
{
    return PyCapsule_New((void *)handle_rounding, NULL, NULL);
}

static PyObject *
rounding_level(PyObject *module, PyObject *most)
{
    const long wanted = PyLong_AsLong(most);
    if (PyErr_Occurred())
        return NULL;
    most_level = wanted < 0 ? 0 : wanted < LEVELS ? (int)wanted : LEVELS - 1;
    return PyLong_FromLong(level());
}

PyMethodDef rounding_functions[] = {
    {"rounding_handler", rounding_handler, METH_NOARGS, PyDoc_STR("The handler of XLA's calls of stochastic rounding.")},
    {"rounding_level", rounding_level, METH_O, PyDoc_STR("While nothing computes, for tests: use instructions of this level at most (0: any processor's, 1: AVX2, 2: AVX-512); the level that is used.")},
    {NULL, NULL, 0, NULL},
};
