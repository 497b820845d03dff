/* Stochastic rounding onto the halves: the handler of the call `podrun_rounding`.

   With it come the operation whose result is rounded, what replaces infinities, and conversions from halves and to them.
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

enum { NUMBERS = 9, MOST_VALUES = 2, WORDS = 2, PART = 1 << 16, BLOCK = 1 << 10 };
enum { NOTHING, ADD, SUBTRACT, MULTIPLY, DIVIDE, ROOT, OPERATIONS }; /* before the rounding */
enum { AS_IT_IS, TO_NAN, TO_GREATEST, CLIPS };                       /* what becomes of infinities */

INLINE uint32_t
mixed(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* `count` elements, of which the first is number `first` of what one state rounds. `out` may be `in`. */
INLINE void
round_elements(const uint32_t *in, uint32_t *out, int64_t count, uint32_t first, uint32_t low, uint32_t high)
{
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = in[i], field = (bits >> 23) & 255;
        const int32_t hash = (int32_t)(mixed(mixed((first + (uint32_t)i) ^ low) + high) >> 8);
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

/* What an operation gives. `out` may be `a` or `b`. */
INLINE void
combine_elements(int operation, const float *a, const float *b, float *out, int64_t count)
{
#define ELEMENTS(EXPRESSION)                                                                                           \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < count; i++) out[i] = EXPRESSION;                                      \
    break
    switch (operation) {
    case ADD: ELEMENTS(a[i] + b[i]);
    case SUBTRACT: ELEMENTS(a[i] - b[i]);
    case MULTIPLY: ELEMENTS(a[i] * b[i]);
    case DIVIDE: ELEMENTS(a[i] / b[i]);
    case ROOT: ELEMENTS(__builtin_sqrtf(a[i]));
    }
#undef ELEMENTS
}

INLINE void
clip_elements(int clip, uint32_t *values, int64_t count)
{
    const uint32_t sign = clip == TO_NAN ? 0 : 0x80000000u, other = clip == TO_NAN ? 0x7FC00000u : 0x477FE000u;
    for (int64_t i = 0; i < count; i++)
        values[i] = (values[i] & 0x7FFFFFFFu) == 0x7F800000u ? (values[i] & sign) | other : values[i];
}

/* Halves as float32, and float32 on the grid of the halves as halves. */
INLINE void
widen_elements(const uint16_t *in, uint32_t *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = in[i], sign = (bits & 0x8000u) << 16, field = (bits >> 10) & 31;
        union {
            float value;
            uint32_t bits;
        } denormal = {(float)(int32_t)(bits & 0x3FFu) * 0x1p-24f};
        const uint32_t normal = ((bits & 0x7FFFu) << 13) + (field == 31 ? 224u << 23 : 112u << 23);
        out[i] = sign | (field ? normal : denormal.bits);
    }
}

INLINE void
narrow_elements(const uint32_t *in, uint16_t *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        union {
            uint32_t bits;
            float value;
        } size = {in[i] & 0x7FFFFFFFu};
        const uint32_t field = size.bits >> 23, small = (uint32_t)(int32_t)((field < 113 ? size.value : 0.0f) * 0x1p24f);
        const uint32_t normal = (size.bits >> 13) - (field == 255 ? 224u << 10 : 112u << 10);
        out[i] = (uint16_t)((in[i] >> 16 & 0x8000u) | (field < 113 ? small : normal));
    }
}

/* Each kind of processor has functions of its own, which are not inlined: nothing moves over a change of mode. */
typedef struct {
    void (*round)(const uint32_t *, uint32_t *, int64_t, uint32_t, uint32_t, uint32_t);
    void (*combine)(int, const float *, const float *, float *, int64_t);
    void (*clip)(int, uint32_t *, int64_t);
    void (*widen)(const uint16_t *, uint32_t *, int64_t);
    void (*narrow)(const uint32_t *, uint16_t *, int64_t);
} Functions;

#define FOR_PROCESSOR(NAME, FEATURES)                                                                                  \
    WITH(FEATURES) static void round_##NAME(const uint32_t *in, uint32_t *out, int64_t count, uint32_t first,          \
                                            uint32_t low, uint32_t high)                                               \
    {                                                                                                                  \
        round_elements(in, out, count, first, low, high);                                                              \
    }                                                                                                                  \
    WITH(FEATURES) static void combine_##NAME(int operation, const float *a, const float *b, float *out, int64_t count) \
    {                                                                                                                  \
        combine_elements(operation, a, b, out, count);                                                                 \
    }                                                                                                                  \
    WITH(FEATURES) static void clip_##NAME(int clip, uint32_t *values, int64_t count)                                  \
    {                                                                                                                  \
        clip_elements(clip, values, count);                                                                            \
    }                                                                                                                  \
    WITH(FEATURES) static void widen_##NAME(const uint16_t *in, uint32_t *out, int64_t count)                          \
    {                                                                                                                  \
        widen_elements(in, out, count);                                                                                \
    }                                                                                                                  \
    WITH(FEATURES) static void narrow_##NAME(const uint32_t *in, uint16_t *out, int64_t count)                         \
    {                                                                                                                  \
        narrow_elements(in, out, count);                                                                               \
    }

FOR_PROCESSOR(on_any, "sse2")
FOR_PROCESSOR(on_avx2, "avx2")
FOR_PROCESSOR(on_avx512, "avx512f,avx512bw,avx512dq,avx512vl")

#define FUNCTIONS(NAME) {round_##NAME, combine_##NAME, clip_##NAME, widen_##NAME, narrow_##NAME}
static const Functions functions[LEVELS] = {FUNCTIONS(on_any), FUNCTIONS(on_avx2), FUNCTIONS(on_avx512)};

/* Element i of an operand of the operation is that number `i / inner % count` of its array, of halves or float32. */
typedef struct {
    const void *data;
    int64_t inner, count;
    int halves;
} Values;

/* A result of `count` states, `each` elements for one of them; the states lie `stride` words apart. */
typedef struct {
    Values values[MOST_VALUES];
    const uint32_t *states;
    void *out;
    int64_t each, count, stride;
    int operation, clip, halves;
} Rounding;

/* Elements of an operand from `first` on, where they lie or written to `room`. */
static const void *
block_of(const Functions *use, const Values *values, int64_t first, int64_t count, uint32_t *room)
{
    for (int64_t at = 0; at < count;) {
        const int64_t begin = first + at, element = begin / values->inner % values->count;
        int64_t stretch = values->inner > 1 ? values->inner - begin % values->inner : values->count - element;
        stretch = stretch < count - at ? stretch : count - at;
        const int64_t fresh = values->inner > 1 ? 1 : stretch;
        if (values->halves)
            use->widen((const uint16_t *)values->data + element, room + at, fresh);
        else if (fresh == count)
            return (const uint32_t *)values->data + element;
        else
            memcpy(room + at, (const uint32_t *)values->data + element, fresh * sizeof *room);
        for (int64_t i = at + fresh; i < at + stretch; i++)
            room[i] = room[at];
        at += stretch;
    }
    return room;
}

/* Elements from `first` on, number `number` and further of what one state rounds. */
static void
round_block(const Functions *use, const Rounding *r, int64_t first, int64_t count, uint32_t number, const uint32_t *words)
{
    uint32_t rooms[MOST_VALUES][BLOCK], *out = r->halves ? rooms[0] : (uint32_t *)r->out + first;
    const void *in = block_of(use, &r->values[0], first, count, rooms[0]);
    if (r->operation != NOTHING) {
        const void *other = r->operation == ROOT ? in : block_of(use, &r->values[1], first, count, rooms[1]);
        use->combine(r->operation, in, other, (float *)out, count);
        in = out;
    }
    use->round(in, out, count, number, words[0], words[1]);
    if (r->clip != AS_IT_IS)
        use->clip(r->clip, out, count);
    if (r->halves)
        use->narrow(out, (uint16_t *)r->out + first, count);
}

/* Part i of all elements of all states, end to end. */
static void
round_part(void *what, int i)
{
    const Rounding *r = what;
    const unsigned before = MODE();
    const int64_t all = r->each * r->count, start = (int64_t)i * PART, stop = all - start < PART ? all : start + PART;
    const Functions *use = &functions[instruction_level()];
    SET_MODE(before | FLUSHES);
    for (int64_t at = start; at < stop;) {
        const int64_t state = at / r->each, offset = state * r->each, end = offset + r->each < stop ? offset + r->each : stop;
        const int64_t count = end - at < BLOCK ? end - at : BLOCK;
        round_block(use, r, at, count, (uint32_t)(at - offset), r->states + state * r->stride);
        at += count;
    }
    SET_MODE(before);
}

/* Whether a buffer is an operand's array: its pattern are the numbers `inner` and `count`. */
static int
take_values(Values *values, const FfiBuffer *buffer, const int64_t *pattern)
{
    const int halves = buffer->type == FFI_F16;
    *values = (Values){buffer->data, pattern[0], pattern[1], halves};
    return elements_of(buffer, halves ? FFI_F16 : FFI_F32) == pattern[1];
}

/* Its numbers: elements for one state, tables of states, rows of each; the operation before the rounding and the clip behind
   it; `inner` and `count` of two operands. Its arrays: these operands (one where the operation takes one), tables, the row.
   A row outside of them is the nearest. */
static FfiError *
handle_rounding(FfiCall *call)
{
    if (call->extension)
        return described(call);
    const FfiArray *numbers = numbers_of(call);
    const int64_t *n = numbers && numbers->length == NUMBERS ? numbers->data : NULL;
    int fits = n && n[3] >= 0 && n[3] < OPERATIONS && n[4] >= 0 && n[4] < CLIPS;
    for (int i = 0; fits && i < NUMBERS; i++)
        fits = i == 3 || i == 4 || (n[i] > 0 && n[i] <= INT32_MAX);
    const int values = fits && n[3] >= ADD && n[3] <= DIVIDE ? 2 : 1;
    if (!fits || call->arguments.count != values + 2 || call->results.count != 1 || n[0] * n[1] > INT32_MAX)
        return failed(call, FFI_INVALID, "podrun_rounding: its numbers describe no rounding");
    const FfiBuffer *const *in = (const FfiBuffer *const *)call->arguments.values, *out = call->results.values[0];
    const FfiBuffer *states = in[values], *row = in[values + 1];
    const int64_t all = n[0] * n[1];
    Rounding r = {.each = n[0], .count = n[1], .stride = n[2] * WORDS, .operation = (int)n[3], .clip = (int)n[4]};
    r.halves = out->type == FFI_F16;
    for (int i = 0; fits && i < values; i++)
        fits = take_values(&r.values[i], in[i], n + 5 + 2 * i);
    if (!fits || elements_of(out, r.halves ? FFI_F16 : FFI_F32) != all || elements_of(row, FFI_S32) != 1 ||
        elements_of(states, FFI_U32) != n[1] * n[2] * WORDS)
        return failed(call, FFI_INVALID, "podrun_rounding: an operand or result of another size than its numbers say");
    const int64_t wanted = *(const int32_t *)row->data, at = wanted < 0 ? 0 : wanted < n[2] ? wanted : n[2] - 1;
    r.states = (const uint32_t *)states->data + at * WORDS;
    r.out = out->data;
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

PyMethodDef rounding_functions[] = {
    {"rounding_handler", rounding_handler, METH_NOARGS, PyDoc_STR("The handler of XLA's calls of stochastic rounding.")},
    {NULL, NULL, 0, NULL},
};
