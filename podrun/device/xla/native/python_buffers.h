/* What functions of the Python module take: sequences of integers, and buffers of float32. Include Python.h before. */

#ifndef PODRUN_PYTHON_BUFFERS_H
#define PODRUN_PYTHON_BUFFERS_H

#include <stdint.h>

#include "library.h"

/* Whether there is a library to compute with; 0 with an exception. */
static inline int
is_loaded(void)
{
    if (!engine)
        PyErr_SetString(PyExc_RuntimeError, "no library is loaded yet: call load with its path first");
    return engine != NULL;
}

/* The integers of a sequence, of which `most` have room; gives how many there are, or -1 with an exception. */
static inline Py_ssize_t
integers_of(PyObject *from, int64_t *numbers, Py_ssize_t most)
{
    PyObject *items = PySequence_Fast(from, "a call is a sequence of integers");
    if (!items)
        return -1;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    for (Py_ssize_t i = 0; i < count && i < most; i++)
        numbers[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items, i));
    Py_DECREF(items);
    return PyErr_Occurred() ? -1 : count;
}

/* Hold the memory of so many operands, and of the result behind them. `sizes`: elements of each; the operand `roomy` may have
   more (-1: none). Gives how many views are held; `fits`: all are, and have these sizes. */
static inline int
hold_floats(PyObject *operands, PyObject *result, const int64_t *sizes, int count, int roomy, Py_buffer *views,
            float **memory, int *fits)
{
    int held = 0;
    *fits = PyTuple_GET_SIZE(operands) == count;
    for (; *fits && held <= count; held++) {
        PyObject *source = held < count ? PyTuple_GET_ITEM(operands, held) : result;
        if (PyObject_GetBuffer(source, &views[held], held < count ? PyBUF_SIMPLE : PyBUF_WRITABLE)) {
            *fits = 0;
            break;
        }
        const Py_ssize_t bytes = sizes[held] * (Py_ssize_t)sizeof(float);
        *fits = held == roomy ? views[held].len >= bytes : views[held].len == bytes;
        memory[held] = views[held].buf;
    }
    return held;
}

#endif
