/* A whole collective in one native call, for the case that nothing unusual happens.

   Where there are more ranks than cores, each rank gets a core once for each barrier and then runs cold code: a few
   hundred instructions of C instead of some ten thousand of the interpreter. The shared memory, the words written there
   and the order of every sum are those of `barrier.py`, `plans.py` and `arithmetic.py`, which give the reasons; ranks
   with and without this module work in one group. Everything unusual (a rank that is late or asleep, a failed group, a type
   that is not summed here) is left to Python, through the callables given to `Plan`.

   No sum may be contracted or reordered: built with -ffp-contract=off, never with -ffast-math.

   Order in memory: a rank's word is stored after all that it wrote before, and what others wrote is read after their
   words were seen (release and acquire), on every processor. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define PROTOCOL 2 /* as barrier.py's: a module built from another version is not used */
#define PHASES 4
#define MOST_SETS 8
#define GIL_BYTES 32768 /* a sum over this many bytes or more releases the GIL */
#define BLOCK 512       /* elements whose running results in float32 stay in the first cache */

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define FOR_EACH_CPU
#endif

/* --- Sums ---------------------------------------------------------------------------------------------------------- */

/* outs[...][i] = parts[0][i] + parts[1][i] + ..., in order, for all i; divided by the number of parts for the mean.
   A block of four vectors of 64 bytes stays in registers; every value is read once. outs may be parts. */
#define SUM(NAME, T, DIVIDE)                                                                                           \
    typedef T NAME##_vector __attribute__((vector_size(64)));                                                          \
    FOR_EACH_CPU static void NAME(char *const *parts, size_t count, char *const *outs, size_t results, size_t bytes,   \
                                  int mean)                                                                            \
    {                                                                                                                  \
        const T divisor = (T)count;                                                                                    \
        size_t at = 0;                                                                                                 \
        for (; at + 256 <= bytes; at += 256) {                                                                         \
            NAME##_vector a, b, c, d, x;                                                                               \
            const char *part = parts[0] + at;                                                                          \
            memcpy(&a, part, 64), memcpy(&b, part + 64, 64), memcpy(&c, part + 128, 64), memcpy(&d, part + 192, 64);   \
            for (size_t k = 1; k < count; k++) {                                                                       \
                part = parts[k] + at;                                                                                  \
                memcpy(&x, part, 64), a += x;                                                                          \
                memcpy(&x, part + 64, 64), b += x;                                                                     \
                memcpy(&x, part + 128, 64), c += x;                                                                    \
                memcpy(&x, part + 192, 64), d += x;                                                                    \
            }                                                                                                          \
            if (DIVIDE && mean)                                                                                        \
                a /= divisor, b /= divisor, c /= divisor, d /= divisor;                                                \
            for (size_t k = 0; k < results; k++) {                                                                     \
                char *out = outs[k] + at;                                                                              \
                memcpy(out, &a, 64), memcpy(out + 64, &b, 64), memcpy(out + 128, &c, 64), memcpy(out + 192, &d, 64);   \
            }                                                                                                          \
        }                                                                                                              \
        for (; at < bytes; at += sizeof(T)) {                                                                          \
            T total, x;                                                                                                \
            memcpy(&total, parts[0] + at, sizeof(T));                                                                  \
            for (size_t k = 1; k < count; k++)                                                                         \
                memcpy(&x, parts[k] + at, sizeof(T)), total += x;                                                      \
            if (DIVIDE && mean)                                                                                        \
                total /= divisor;                                                                                      \
            for (size_t k = 0; k < results; k++)                                                                       \
                memcpy(outs[k] + at, &total, sizeof(T));                                                               \
        }                                                                                                              \
    }

SUM(sum_float, float, 1)
SUM(sum_double, double, 1)
SUM(sum_32, uint32_t, 0) /* unsigned: wraps around, as NumPy's signed integers do */
SUM(sum_64, uint64_t, 0)

static inline float
as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t
as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* float16 and float32 as NumPy converts them, in arithmetic that compilers phase into vectors on any processor. */
static inline float
widen_half(uint16_t half)
{
    const uint32_t rest = (uint32_t)(half & 0x7fff) << 13, exponent = rest & 0x0f800000;
    const uint32_t large = rest + (exponent == 0x0f800000 ? 224u << 23 : 112u << 23); /* infinity and NaN, or normal */
    const uint32_t small = as_bits(as_float(rest + (113u << 23)) - as_float(113u << 23)); /* subnormal, exactly */
    return as_float((exponent ? large : small) | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t
narrow_half(float value)
{
    const uint32_t sign = as_bits(value) >> 16 & 0x8000, bits = as_bits(value) & 0x7fffffff;
    const uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13; /* to nearest, ties to even */
    const uint32_t small = as_bits(as_float(bits) + 0.5f) - as_bits(0.5f);          /* the addition rounds */
    const uint32_t payload = bits >> 13 & 0x3ff;
    const uint32_t large = bits > 0x7f800000 ? 0x7c00 | (payload ? payload : 1) : 0x7c00;
    return (uint16_t)(sign | (bits >= 143u << 23 ? large : bits < 113u << 23 ? small : normal));
}

static inline float
widen_bfloat(uint16_t bits)
{
    return as_float((uint32_t)bits << 16);
}

static inline uint16_t
narrow_bfloat(float value)
{
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 & 0x8000) | 0x7fc0 : rounded);
}

#define SAME(x) (x)
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
#define LEAST(a, b) ((a) < (b) || (a) != (a) ? (a) : (b)) /* propagate NaN, as NumPy does */
#define MOST(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))

/* As SUM, for any OPERATION, in float32: widened, combined in order, narrowed once. outs may be parts. */
#define COMBINE(NAME, T, WIDEN, NARROW, OPERATION)                                                                     \
    FOR_EACH_CPU static void NAME(char *const *parts, size_t count, char *const *outs, size_t results, size_t bytes,   \
                                  int mean)                                                                            \
    {                                                                                                                  \
        const float divisor = (float)count;                                                                            \
        for (size_t at = 0; at < bytes; at += BLOCK * sizeof(T)) {                                                     \
            const size_t left = (bytes - at) / sizeof(T), n = left < BLOCK ? left : BLOCK;                             \
            const T *part = (const T *)(parts[0] + at);                                                                \
            T *out = (T *)(outs[0] + at);                                                                              \
            float total[BLOCK];                                                                                        \
            for (size_t i = 0; i < n; i++)                                                                             \
                total[i] = WIDEN(part[i]);                                                                             \
            for (size_t k = 1; k < count; k++) {                                                                       \
                part = (const T *)(parts[k] + at);                                                                     \
                for (size_t i = 0; i < n; i++) {                                                                       \
                    const float x = WIDEN(part[i]);                                                                    \
                    total[i] = OPERATION(total[i], x);                                                                 \
                }                                                                                                      \
            }                                                                                                          \
            if (mean)                                                                                                  \
                for (size_t i = 0; i < n; i++)                                                                         \
                    total[i] /= divisor;                                                                               \
            for (size_t i = 0; i < n; i++)                                                                             \
                out[i] = NARROW(total[i]);                                                                             \
            for (size_t k = 1; k < results; k++)                                                                       \
                memcpy(outs[k] + at, out, n * sizeof(T));                                                              \
        }                                                                                                              \
    }

COMBINE(product_float, float, SAME, SAME, TIMES)
COMBINE(min_float, float, SAME, SAME, LEAST)
COMBINE(max_float, float, SAME, SAME, MOST)
COMBINE(sum_half, uint16_t, widen_half, narrow_half, PLUS)
COMBINE(product_half, uint16_t, widen_half, narrow_half, TIMES)
COMBINE(min_half, uint16_t, widen_half, narrow_half, LEAST)
COMBINE(max_half, uint16_t, widen_half, narrow_half, MOST)
COMBINE(sum_bfloat, uint16_t, widen_bfloat, narrow_bfloat, PLUS)
COMBINE(product_bfloat, uint16_t, widen_bfloat, narrow_bfloat, TIMES)
COMBINE(min_bfloat, uint16_t, widen_bfloat, narrow_bfloat, LEAST)
COMBINE(max_bfloat, uint16_t, widen_bfloat, narrow_bfloat, MOST)

typedef void (*Kernel)(char *const *, size_t, char *const *, size_t, size_t, int);

/* The reductions of this module by type (arithmetic.py has the names) and operation. */
static const struct {
    const char *kind, *operation;
    size_t size;
    int mean;
    Kernel kernel;
} kernels[] = {
    {"float32", "sum", 4, 0, sum_float},       {"float32", "mean", 4, 1, sum_float},
    {"float32", "min", 4, 0, min_float},       {"float32", "max", 4, 0, max_float},
    {"float32", "product", 4, 0, product_float},
    {"float64", "sum", 8, 0, sum_double},      {"float64", "mean", 8, 1, sum_double},
    {"int32", "sum", 4, 0, sum_32},            {"int64", "sum", 8, 0, sum_64},
    {"float16", "sum", 2, 0, sum_half},        {"float16", "mean", 2, 1, sum_half},
    {"float16", "min", 2, 0, min_half},        {"float16", "max", 2, 0, max_half},
    {"float16", "product", 2, 0, product_half},
    {"bfloat16", "sum", 2, 0, sum_bfloat},     {"bfloat16", "mean", 2, 1, sum_bfloat},
    {"bfloat16", "min", 2, 0, min_bfloat},     {"bfloat16", "max", 2, 0, max_bfloat},
    {"bfloat16", "product", 2, 0, product_bfloat},
};

/* --- Barriers ------------------------------------------------------------------------------------------------------ */

/* State of a rank's barriers. Base of `barrier.Barriers`, so that Python and C share it. */
typedef struct {
    PyObject_HEAD
    long long count; /* barriers that it has arrived at */
    int spins;       /* 1: known to be the only rank of its process, so it may spin */
    int quick_looks; /* reads of the words before it yields the core */
    double spin;     /* seconds of spinning */
} Counts;

static PyMemberDef counts_members[] = {
    {"count", T_LONGLONG, offsetof(Counts, count), 0, NULL},
    {"spins", T_INT, offsetof(Counts, spins), 0, NULL},
    {"quick_looks", T_INT, offsetof(Counts, quick_looks), 0, NULL},
    {"spin", T_DOUBLE, offsetof(Counts, spin), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject CountsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "podrun.collectives._collectives.Counts",
    .tp_doc = PyDoc_STR("State of a rank's barriers."),
    .tp_basicsize = sizeof(Counts),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = counts_members,
};

typedef struct {
    uint64_t *own, *words, *window; /* in shared memory */
    uint64_t word;
    Py_buffer everyone; /* the window when all have arrived, nothing has failed and no rank sleeps */
} Phase;

typedef struct {
    PyObject_HEAD
    Counts *counts;
    PyObject *label, *wait;
    Py_buffer shared;
    size_t ranks;
    uint64_t *failed;
    Phase phases[PHASES];
    int phases_made;
} Barrier;

static inline int
all_are(const uint64_t *words, const uint64_t *wanted, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (__atomic_load_n(words + i, __ATOMIC_RELAXED) != wanted[i])
            return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return 1;
}

static inline int
quiet(const Phase *phase)
{
    return all_are(phase->window, phase->everyone.buf, (size_t)phase->everyone.len / 8);
}

static inline int
all_arrived(const Barrier *m, const Phase *phase)
{
    for (size_t i = 0; i < m->ranks; i++)
        if (__atomic_load_n(phase->words + i, __ATOMIC_RELAXED) != phase->word)
            return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return 1;
}

static double
now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Spin until all have arrived; 0 if that takes too long. */
static int
spin_until_all_arrived(const Barrier *m, const Phase *phase)
{
    const Counts *counts = m->counts;
    int there = 0;
    for (int i = 0; i < counts->quick_looks && !there; i++) {
        PAUSE();
        there = all_arrived(m, phase);
    }
    if (there)
        return 1;
    Py_BEGIN_ALLOW_THREADS
    for (double limit = now() + counts->spin; now() < limit;) {
        sched_yield();
        if ((there = all_arrived(m, phase)) || __atomic_load_n(m->failed, __ATOMIC_RELAXED))
            break;
    }
    Py_END_ALLOW_THREADS
    return there;
}

static inline Phase *
arrive(Barrier *m)
{
    Phase *phase = &m->phases[++m->counts->count & (PHASES - 1)];
    __atomic_store_n(phase->own, phase->word, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the word takes effect before the others' words and marks are read */
    return phase;
}

/* 0: all have arrived; -1: an exception. */
static int
arrive_and_wait(Barrier *m, PyObject *timeout)
{
    Phase *phase = arrive(m);
    if (quiet(phase) || (m->counts->spins == 1 && spin_until_all_arrived(m, phase) && quiet(phase)))
        return 0;
    PyObject *done = PyObject_CallFunctionObjArgs(m->wait, m->label, timeout, NULL);
    Py_XDECREF(done);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return done ? 0 : -1;
}

/* No tp_clear: what breaks a cycle through these types is the dict or frame that every such cycle goes through. */
static int
barrier_traverse(Barrier *m, visitproc visit, void *arg)
{
    Py_VISIT(m->counts);
    Py_VISIT(m->wait);
    return 0;
}

static void
barrier_dealloc(Barrier *m)
{
    PyObject_GC_UnTrack(m);
    for (int i = 0; i < m->phases_made; i++)
        PyBuffer_Release(&m->phases[i].everyone);
    if (m->shared.obj)
        PyBuffer_Release(&m->shared);
    Py_XDECREF(m->counts);
    Py_XDECREF(m->label);
    Py_XDECREF(m->wait);
    Py_TYPE(m)->tp_free((PyObject *)m);
}

/* Barrier(counts, shared, failed_at, rank, ranks, label, wait, ((words_at, window_at, word, everyone) x 4)) */
static PyObject *
barrier_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *counts, *shared, *label, *wait, *phases;
    Py_ssize_t failed_at, rank, ranks;
    if (!PyArg_ParseTuple(args, "O!OnnnSOO!", &CountsType, &counts, &shared, &failed_at, &rank, &ranks, &label,
                          &wait, &PyTuple_Type, &phases))
        return NULL;
    Barrier *m = (Barrier *)type->tp_alloc(type, 0);
    if (!m)
        return NULL;
    m->counts = (Counts *)Py_NewRef(counts);
    m->label = Py_NewRef(label);
    m->wait = Py_NewRef(wait);
    m->ranks = (size_t)ranks;
    if (PyObject_GetBuffer(shared, &m->shared, PyBUF_WRITABLE) < 0)
        goto failed;
    char *base = m->shared.buf;
    m->failed = (uint64_t *)(base + failed_at);
    for (int i = 0; i < PHASES; i++) {
        Phase *phase = &m->phases[i];
        Py_ssize_t words_at, window_at;
        unsigned long long word;
        if (i >= PyTuple_GET_SIZE(phases) ||
            !PyArg_ParseTuple(PyTuple_GET_ITEM(phases, i), "nnKy*", &words_at, &window_at, &word, &phase->everyone)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a barrier has four phases");
            goto failed;
        }
        m->phases_made++;
        phase->words = (uint64_t *)(base + words_at);
        phase->own = phase->words + rank;
        phase->window = (uint64_t *)(base + window_at);
        phase->word = word;
    }
    return (PyObject *)m;
failed:
    Py_DECREF(m);
    return NULL;
}

static PyObject *
barrier_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) != 1) {
        PyErr_SetString(PyExc_TypeError, "a barrier is called with its timeout");
        return NULL;
    }
    return arrive_and_wait((Barrier *)self, PyTuple_GET_ITEM(args, 0)) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyTypeObject BarrierType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "podrun.collectives._collectives.Barrier",
    .tp_doc = PyDoc_STR("One rank's side of the barriers with a label; call it with a timeout to arrive and wait for all."),
    .tp_basicsize = sizeof(Barrier),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = barrier_new,
    .tp_traverse = (traverseproc)barrier_traverse,
    .tp_dealloc = (destructor)barrier_dealloc,
    .tp_call = barrier_call,
};

/* --- Reductions ---------------------------------------------------------------------------------------------------- */

/* One prepared reduction: its operands and results. */
typedef struct {
    Kernel kernel; /* NULL: `python` does it */
    PyObject *python;
    char **parts, **outs;
    size_t count, results, bytes;
    int mean;
    Py_buffer *buffers;
    size_t held;
} Sum;

static void
sum_free(Sum *s)
{
    for (size_t i = 0; i < s->held; i++)
        PyBuffer_Release(&s->buffers[i]);
    PyMem_Free(s->buffers);
    PyMem_Free(s->parts);
    PyMem_Free(s->outs);
    Py_XDECREF(s->python);
}

static int
sum_run(Sum *s)
{
    if (!s->kernel) {
        PyObject *done = PyObject_CallNoArgs(s->python);
        Py_XDECREF(done);
        return done ? 0 : -1;
    }
    if (s->bytes * s->count < GIL_BYTES) {
        s->kernel(s->parts, s->count, s->outs, s->results, s->bytes, s->mean);
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS
    s->kernel(s->parts, s->count, s->outs, s->results, s->bytes, s->mean);
    Py_END_ALLOW_THREADS
    return 0;
}

static int
sum_find_kernel(Sum *s, const char *kind, const char *operation, size_t *size)
{
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (!strcmp(kernels[i].kind, kind) && !strcmp(kernels[i].operation, operation)) {
            s->kernel = kernels[i].kernel;
            s->mean = kernels[i].mean;
            *size = kernels[i].size;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "no %s of %s is taken here", operation, kind);
    return -1;
}

/* From (kind, operation, parts, outs), all of one size; or from a callable that does it. */
static int
sum_make(Sum *s, PyObject *from)
{
    PyObject *parts, *outs;
    const char *kind, *operation;
    size_t size;
    if (!PyTuple_Check(from)) {
        s->python = Py_NewRef(from);
        return 0;
    }
    if (!PyArg_ParseTuple(from, "ssO!O!", &kind, &operation, &PyList_Type, &parts, &PyList_Type, &outs) ||
        sum_find_kernel(s, kind, operation, &size) < 0)
        return -1;
    s->count = (size_t)PyList_GET_SIZE(parts);
    s->results = (size_t)PyList_GET_SIZE(outs);
    if (!s->count || !s->results) {
        PyErr_SetString(PyExc_ValueError, "a sum of nothing, or into nothing");
        return -1;
    }
    s->parts = PyMem_Calloc(s->count, sizeof(char *));
    s->outs = PyMem_Calloc(s->results, sizeof(char *));
    s->buffers = PyMem_Calloc(s->count + s->results, sizeof(Py_buffer));
    if (!s->parts || !s->outs || !s->buffers) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < s->count + s->results; i++) {
        PyObject *array = i < s->count ? PyList_GET_ITEM(parts, i) : PyList_GET_ITEM(outs, i - s->count);
        Py_buffer *buffer = &s->buffers[i];
        if (PyObject_GetBuffer(array, buffer, PyBUF_C_CONTIGUOUS | (i < s->count ? 0 : PyBUF_WRITABLE)))
            return -1;
        s->held++;
        if ((size_t)buffer->len % size || (i && (size_t)buffer->len != s->bytes)) {
            PyErr_SetString(PyExc_ValueError, "sums are of arrays of one size and of whole elements");
            return -1;
        }
        s->bytes = (size_t)buffer->len;
        *(i < s->count ? &s->parts[i] : &s->outs[i - s->count]) = buffer->buf;
    }
    return 0;
}

/* The copies before the first barrier, to where other ranks read them, and the reduction after it. */
typedef struct {
    Py_buffer sources[2], targets[2];
    Py_ssize_t copies;
    Sum sum;
} Set;

/* A whole prepared collective: its barriers and what is done between them. */
typedef struct {
    PyObject_HEAD
    Barrier *begin, *end; /* end may be NULL */
    PyObject *result, *timeout;
    int shift;            /* the set used is (count of the first barrier >> shift) modulo the number of sets */
    Py_ssize_t sets;
    Set set[MOST_SETS];
} Plan;

static PyTypeObject PlanType;

static int
plan_traverse(Plan *r, visitproc visit, void *arg)
{
    Py_VISIT(r->begin);
    Py_VISIT(r->end);
    Py_VISIT(r->result);
    for (Py_ssize_t i = 0; i < r->sets; i++)
        Py_VISIT(r->set[i].sum.python);
    return 0;
}

static void
plan_dealloc(Plan *r)
{
    PyObject_GC_UnTrack(r);
    for (Py_ssize_t i = 0; i < r->sets; i++) {
        sum_free(&r->set[i].sum);
        for (Py_ssize_t k = 0; k < r->set[i].copies; k++) {
            PyBuffer_Release(&r->set[i].sources[k]);
            PyBuffer_Release(&r->set[i].targets[k]);
        }
    }
    Py_XDECREF(r->begin);
    Py_XDECREF(r->end);
    Py_XDECREF(r->result);
    Py_XDECREF(r->timeout);
    Py_TYPE(r)->tp_free((PyObject *)r);
}

/* From ([(source, target), ...], sum). */
static int
set_make(Set *set, PyObject *from)
{
    PyObject *copies, *sum, *source, *target;
    if (!PyArg_ParseTuple(from, "O!O", &PyList_Type, &copies, &sum))
        return -1;
    if (PyList_GET_SIZE(copies) > 2) {
        PyErr_SetString(PyExc_ValueError, "at most two pieces are copied");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(copies); i++) {
        if (!PyArg_ParseTuple(PyList_GET_ITEM(copies, i), "OO", &source, &target) ||
            PyObject_GetBuffer(source, &set->sources[i], PyBUF_C_CONTIGUOUS) < 0)
            return -1;
        if (PyObject_GetBuffer(target, &set->targets[i], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
            PyBuffer_Release(&set->sources[i]);
            return -1;
        }
        set->copies++;
        if (set->sources[i].len != set->targets[i].len) {
            PyErr_SetString(PyExc_ValueError, "source and target of a copy differ in size");
            return -1;
        }
    }
    return sum_make(&set->sum, sum);
}

/* plan(begin, end or None, timeout, result, shift, sets): copy out, wait, reduce, wait. */
static PyObject *
make_plan(PyObject *module, PyObject *args)
{
    PyObject *begin, *end, *timeout, *result, *sets;
    int shift;
    if (!PyArg_ParseTuple(args, "O!OOOiO!", &BarrierType, &begin, &end, &timeout, &result, &shift, &PyTuple_Type, &sets))
        return NULL;
    const Py_ssize_t number = PyTuple_GET_SIZE(sets);
    if (end != Py_None && !PyObject_TypeCheck(end, &BarrierType)) {
        PyErr_SetString(PyExc_TypeError, "end must be a Barrier or None");
        return NULL;
    }
    if (number < 1 || number > MOST_SETS || number & (number - 1)) {
        PyErr_SetString(PyExc_ValueError, "sets number 1, 2, 4 or 8");
        return NULL;
    }
    Plan *r = (Plan *)PlanType.tp_alloc(&PlanType, 0);
    if (!r)
        return NULL;
    r->begin = (Barrier *)Py_NewRef(begin);
    r->end = end == Py_None ? NULL : (Barrier *)Py_NewRef(end);
    r->result = Py_NewRef(result);
    r->timeout = Py_NewRef(timeout);
    r->shift = shift;
    for (Py_ssize_t i = 0; i < number; i++) {
        r->sets++;
        if (set_make(&r->set[i], PyTuple_GET_ITEM(sets, i)) < 0) {
            Py_DECREF(r);
            return NULL;
        }
    }
    return (PyObject *)r;
}

static PyObject *
plan_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Plan *r = (Plan *)self;
    Set *set = &r->set[(r->begin->counts->count + 1) >> r->shift & (r->sets - 1)];
    for (Py_ssize_t i = 0; i < set->copies; i++)
        memcpy(set->targets[i].buf, set->sources[i].buf, (size_t)set->sources[i].len);
    if (arrive_and_wait(r->begin, r->timeout) < 0 || sum_run(&set->sum) < 0 || (r->end && arrive_and_wait(r->end, r->timeout) < 0))
        return NULL;
    return Py_NewRef(r->result);
}

static PyTypeObject PlanType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "podrun.collectives._collectives.Plan",
    .tp_doc = PyDoc_STR("A whole prepared collective; a call carries it out and returns its result."),
    .tp_basicsize = sizeof(Plan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_traverse = (traverseproc)plan_traverse,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_call = plan_call,
};

/* reduce((kind, operation, parts, outs)): one reduction by itself. */
static PyObject *
reduce(PyObject *module, PyObject *from)
{
    Sum sum = {0};
    const int done = sum_make(&sum, from) < 0 ? -1 : sum_run(&sum);
    sum_free(&sum);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}

/* fence(): all that was written and read before comes before all that is written and read after. */
static PyObject *
fence(PyObject *module, PyObject *unused)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"plan", make_plan, METH_VARARGS, PyDoc_STR("A Plan that copies out, waits, reduces and waits.")},
    {"reduce", reduce, METH_O, PyDoc_STR("One reduction by itself.")},
    {"fence", fence, METH_NOARGS, PyDoc_STR("A full memory barrier.")},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "podrun.collectives._collectives",
    .m_doc = PyDoc_STR("Whole collectives in one native call."),
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__collectives(void)
{
    if (PyType_Ready(&CountsType) < 0 || PyType_Ready(&BarrierType) < 0 || PyType_Ready(&PlanType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module || PyModule_AddIntConstant(module, "PROTOCOL", PROTOCOL) < 0 ||
        PyModule_AddObjectRef(module, "Counts", (PyObject *)&CountsType) < 0 ||
        PyModule_AddObjectRef(module, "Barrier", (PyObject *)&BarrierType) < 0)
        return NULL;
    return module;
}
