/* Convolutions of few planes. See planes.h.

   A block of six pixels by four vectors of channels stays in registers while its terms are added up: each value of the image
   is read once for 64 channels, each weight once for six pixels. */

#include "planes.h"

#include <immintrin.h>
#include <string.h>

#include "library.h"
#include "network.h"
#include "plans.h"

enum { MOST_ROWS = 64, ROOM = 16, STRIP = 2 };

/* What a row of the result reads: rows of the image, and the weights of each. */
typedef struct {
    const float *rows[MOST_ROWS], *weights[MOST_ROWS], *bias;
    float *dst;
    int64_t count, kw, stride, tap, dst_row;
    int cut;
} Rows;

#define NAME(PART) wide_##PART
#define TARGET "avx512f"
#define VECTOR __m512
#define LANES 16
#define WIDEST 4
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SET _mm512_set1_ps
#define FMA _mm512_fmadd_ps
#define MAX _mm512_max_ps
#define ZERO _mm512_setzero_ps
#include "planes_kernel.h"

#define NAME(PART) narrow_##PART
#define TARGET "avx2,fma"
#define VECTOR __m256
#define LANES 8
#define WIDEST 2
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SET _mm256_set1_ps
#define FMA _mm256_fmadd_ps
#define MAX _mm256_max_ps
#define ZERO _mm256_setzero_ps
#include "planes_kernel.h"

/* Elements of the vectors in use; 0 for none, -1 before the library is loaded. */
static int lanes = -1;

static int
processor_lanes(void)
{
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vl");
    return wide ? 16 : 8;
}

int
planes_vectors(int most)
{
    const int before = lanes, has = onednn.dnnl_get_effective_cpu_isa();
    const int narrow = (has & AVX2) == AVX2 && processor_lanes() >= 8;
    const int wide = narrow && (has & AVX512) == AVX512 && processor_lanes() >= 16;
    lanes = wide && most >= 16 ? 16 : narrow && most >= 8 ? 8 : 0;
    return before;
}

int
planes_lanes(void)
{
    return lanes;
}

int
vector_lanes(void)
{
    return lanes < 0 ? processor_lanes() : lanes;
}

static int most_level = LEVELS - 1;

int
instruction_level(void)
{
    const int wide = vector_lanes(), can = wide >= 16 ? 2 : wide >= 8 ? 1 : 0;
    return can < most_level ? can : most_level;
}

void
limit_instructions(int most)
{
    most_level = most < 0 ? 0 : most < LEVELS ? most : LEVELS - 1;
}

int
planes_can(void)
{
    return lanes > 0;
}

int
planes_fit(const Convolution *c)
{
    return planes_can() && c->kind == FORWARD && c->n == 1 && c->groups == 1 && c->shuffle == 1 && !(c->follows & OTHER) &&
           c->dilation[0] == 1 && c->dilation[1] == 1 && c->c <= MOST_PLANES && c->c * c->kh <= MOST_ROWS;
}

/* The weights with whole vectors of outputs side by side, and so many elements between those of neighbouring columns, rows and
   inputs: as they lie, or a copy in `room`. */
static const float *
ready_weights(const Convolution *c, const float *weights, float *room, int64_t outputs, int64_t *steps)
{
    if (c->order[1] == 1 && outputs == c->m) {
        steps[0] = c->order[4], steps[1] = c->order[3], steps[2] = c->order[2];
        return weights;
    }
    steps[0] = outputs, steps[1] = c->kw * outputs, steps[2] = c->kh * c->kw * outputs;
    for (int64_t i = 0; i < c->c; i++)
        for (int64_t y = 0; y < c->kh; y++)
            for (int64_t x = 0; x < c->kw; x++, room += outputs) {
                const float *from = weights + i * c->order[2] + y * c->order[3] + x * c->order[4];
                for (int64_t m = 0; m < outputs; m++)
                    room[m] = m < c->m ? from[m * c->order[1]] : 0.0f;
            }
    return room - c->c * c->kh * c->kw * outputs;
}

const char *
planes_rows(const Convolution *c, const Arrays *arrays, int64_t begin, int64_t end)
{
    const int64_t outputs = (c->m + ROOM - 1) / ROOM * ROOM, length = (c->ow - 1) * c->stride[1] + c->kw;
    const int64_t taps = c->c * c->kh * c->kw, inside = c->iw < length - c->pad[1] ? c->iw : length - c->pad[1];
    const int padded = c->pad[1] > 0 || length > c->iw;
    float *room = scratch(1, (size_t)((taps + 1) * outputs + c->c * c->kh * length) * sizeof(float));
    if (!room)
        return "out of memory";
    int64_t steps[3];
    const float *weights = ready_weights(c, arrays->weights, room, outputs, steps);
    float *bias = room + taps * outputs;
    memset(bias, 0, (size_t)outputs * sizeof *bias);
    if (arrays->bias)
        memcpy(bias, arrays->bias, (size_t)c->m * sizeof *bias);
    Rows r = {.bias = bias, .kw = c->kw, .stride = c->stride[1], .tap = steps[0], .dst_row = c->dst_row};
    r.cut = (c->follows & CUT) != 0;
    const int wide = lanes == 16;
    for (int64_t y = begin; y < end; y++) {
        float *copy = bias + outputs;
        r.count = 0;
        for (int64_t i = 0; i < c->c; i++)
            for (int64_t k = 0; k < c->kh; k++) {
                const int64_t at = y * c->stride[0] + k - c->pad[0];
                if (at < 0 || at >= c->ih)
                    continue;
                const float *from = arrays->src + (i * c->ih + at) * c->iw;
                if (padded) {
                    memset(copy, 0, (size_t)length * sizeof *copy);
                    if (inside > 0)
                        memcpy(copy + c->pad[1], from, (size_t)inside * sizeof *copy);
                    from = copy;
                    copy += length;
                }
                r.rows[r.count] = from;
                r.weights[r.count++] = weights + i * steps[2] + k * steps[1];
            }
        r.dst = arrays->dst + (y - begin) * c->ow * c->dst_row;
        (wide ? wide_row : narrow_row)(&r, c->ow, c->m);
    }
    return NULL;
}

static int64_t
clipped(int64_t row, int64_t rows)
{
    return row < 0 ? 0 : row < rows ? row : rows;
}

/* A few rows of windows at a time, so that the rows below them stay in the cache; those that the next windows read again are
   moved. */
const char *
planes_pooled(const Convolution *c, const Arrays *arrays, const Pool *pool, const Chain *chain, float *dst, int64_t begin,
              int64_t end)
{
    const int64_t row = c->ow * c->m, most = (STRIP - 1) * pool->stride[0] + pool->kernel[0];
    const int64_t rows = most < c->oh ? most : c->oh;
    float *strip = scratch(0, (size_t)((rows + 1) * row) * sizeof(float));
    if (!strip)
        return "out of memory";
    Convolution dense = *c;
    dense.dst_row = c->m;
    for (int64_t at = begin, first = 0, last = 0; at < end; at += STRIP) {
        const int64_t until = at + STRIP < end ? at + STRIP : end, top = at * pool->stride[0] - pool->pad[0];
        const int64_t from = clipped(top, c->oh), to = clipped((until - 1 - at) * pool->stride[0] + pool->kernel[0] + top, c->oh);
        const int64_t kept = last > from ? last - from : 0;
        memmove(strip, strip + (from - first) * row * (kept > 0), (size_t)(kept * row) * sizeof *strip);
        Arrays some = *arrays;
        some.dst = strip + kept * row;
        const char *error = planes_rows(&dense, &some, from + kept, to);
        if (error)
            return error;
        first = from, last = to;
        Pool part = *pool;
        part.ih = to > from ? to - from : 0;
        part.oh = until - at;
        part.pad[0] = from - top;
        Chain after = *chain;
        for (int k = 0; k < after.count; k++)
            if (after.ops[k].by == BY_PIXEL || after.ops[k].by == BY_ELEMENT)
                after.ops[k].values += at * pool->ow * (after.ops[k].by == BY_PIXEL ? 1 : after.ops[k].row);
        pool_rows(&part, &after, strip, dst + at * pool->ow * pool->dst_row, strip + rows * row, 0, part.oh);
    }
    return NULL;
}
