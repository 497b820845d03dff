/* Random words by Threefry-2x32 with 20 rounds: the handler of the call `podrun_random_words`.

   The same bits as the formula of `podrun/compiler/random_words.py`, which XLA compiles where this module is missing.
   Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "planes.h"
#include "processor_modes.h"
#include "workers.h"
#include "xla_ffi.h"

enum { OPERANDS = 4, PART = 1 << 16 };

/* Keys and counters of `count` words, and where the words go. Without `own_keys` all have the first key. */
typedef struct {
    const uint32_t *first, *second, *low, *high;
    uint32_t *out_low, *out_high;
    int64_t count;
    int own_keys;
} Words;

#define MIX(DISTANCE) (x += y, y = x ^ (y << (DISTANCE) | y >> (32 - (DISTANCE))))
#define GROUP(A, B, C, D, LOW, HIGH, NUMBER) (MIX(A), MIX(B), MIX(C), MIX(D), x += (LOW), y += (HIGH) + (NUMBER))

INLINE void
hash_words(const Words *w, int own_keys)
{
    const uint32_t *restrict low = w->low, *restrict high = w->high;
    uint32_t *restrict out_low = w->out_low, *restrict out_high = w->out_high;
    for (int64_t i = 0; i < w->count; i++) {
        const uint32_t a = w->first[own_keys ? i : 0], b = w->second[own_keys ? i : 0], c = a ^ b ^ 0x1BD11BDAu;
        uint32_t x = low[i] + a, y = high[i] + b;
        GROUP(13, 15, 26, 6, b, c, 1u);
        GROUP(17, 29, 16, 24, c, a, 2u);
        GROUP(13, 15, 26, 6, a, b, 3u);
        GROUP(17, 29, 16, 24, b, c, 4u);
        GROUP(13, 15, 26, 6, c, a, 5u);
        out_low[i] = x;
        out_high[i] = y;
    }
}

#define FOR_PROCESSOR(NAME, FEATURES)                                                                                  \
    WITH(FEATURES) static void words_##NAME(const Words *words)                                                        \
    {                                                                                                                  \
        if (words->own_keys)                                                                                           \
            hash_words(words, 1);                                                                                      \
        else                                                                                                           \
            hash_words(words, 0);                                                                                      \
    }

FOR_PROCESSOR(on_any, "sse2")
FOR_PROCESSOR(on_avx2, "avx2")
FOR_PROCESSOR(on_avx512, "avx512f,avx512bw,avx512dq,avx512vl")

static void (*const functions[LEVELS])(const Words *) = {words_on_any, words_on_avx2, words_on_avx512};

static void
words_part(void *what, int i)
{
    const Words *all = what;
    const int64_t start = (int64_t)i * PART, rest = all->count - start, keys = all->own_keys ? start : 0;
    const Words part = {all->first + keys,
                        all->second + keys,
                        all->low + start,
                        all->high + start,
                        all->out_low + start,
                        all->out_high + start,
                        rest < PART ? rest : PART,
                        all->own_keys};
    functions[instruction_level()](&part);
}

/* Its number: words of each half. Its arrays: both words of the key, one key or one for each word; the counters. Its result
   is the first words, then the second. */
static FfiError *
handle_random_words(FfiCall *call)
{
    if (call->extension)
        return described(call);
    const FfiArray *numbers = numbers_of(call);
    const int64_t *n = numbers && numbers->length == 1 ? numbers->data : NULL;
    if (!n || *n <= 0 || *n > INT32_MAX || call->arguments.count != OPERANDS || call->results.count != 1)
        return failed(call, FFI_INVALID, "podrun_random_words: its number describes no words");
    const FfiBuffer *const *in = (const FfiBuffer *const *)call->arguments.values, *out = call->results.values[0];
    const int64_t keys = elements_of(in[0], FFI_U32);
    if ((keys != 1 && keys != *n) || elements_of(in[1], FFI_U32) != keys || elements_of(in[2], FFI_U32) != *n ||
        elements_of(in[3], FFI_U32) != *n || elements_of(out, FFI_U32) != 2 * *n)
        return failed(call, FFI_INVALID, "podrun_random_words: an operand or result of another size than its number says");
    Words words = {in[0]->data,         in[1]->data,    in[2]->data, in[3]->data, out->data,
                   (uint32_t *)out->data + *n, *n, keys > 1};
    const int64_t parts = (*n + PART - 1) / PART;
    if (parts == 1)
        words_part(&words, 0);
    else
        workers_run(words_part, &words, (int)parts);
    return NULL;
}

static PyObject *
random_words_handler(PyObject *module, PyObject *unused)
{
    return PyCapsule_New((void *)handle_random_words, NULL, NULL);
}

PyMethodDef random_words_functions[] = {
    {"random_words_handler", random_words_handler, METH_NOARGS, PyDoc_STR("The handler of XLA's calls for random words.")},
    {NULL, NULL, 0, NULL},
};
