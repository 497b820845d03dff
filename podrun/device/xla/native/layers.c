/* Loops that the compiler makes vectors of, once for each instruction set; no operation is contracted, so all give the
   same bits. See layers.h. */

#include "layers.h"

#include <math.h>
#include <string.h>

#include "network.h"

#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#define INLINE static inline __attribute__((always_inline))

/* XLA's maximum: one that is no number stays. */
INLINE float
maximum(float a, float b)
{
    return a > b || a != a ? a : b;
}

#define ROWS(EXPRESSION)                                                                                               \
    for (int64_t i = 0; i < count; i++) {                                                                              \
        const float a = from[i], b = values ? values[i] : number;                                                     \
        to[i] = EXPRESSION;                                                                                            \
    }                                                                                                                  \
    break

INLINE void
apply(int op, float *to, const float *from, const float *values, float number, int64_t count)
{
    switch (op) {
    case OP_ADD: ROWS(a + b);
    case OP_SUBTRACT: ROWS(a - b);
    case OP_MULTIPLY: ROWS(a * b);
    case OP_DIVIDE: ROWS(a / b);
    case OP_MAXIMUM: ROWS(maximum(a, b));
    default: ROWS(a > b ? a : b);
    }
}

/* One pixel or several that lie one after the other. */
INLINE void
apply_all(const Chain *chain, const float *from, float *to, int64_t pixel)
{
    const int64_t count = chain->channels;
    if (!chain->count && from != to)
        memcpy(to, from, (size_t)count * sizeof *to);
    for (int k = 0; k < chain->count; k++, from = to) {
        const Op *op = &chain->ops[k];
        if (op->by == BY_CHANNEL)
            apply(op->op, to, from, op->values, 0, count);
        else if (op->by == BY_ELEMENT)
            apply(op->op, to, from, op->values + pixel * op->row, 0, count);
        else
            apply(op->op, to, from, NULL, op->by == BY_PIXEL ? op->values[pixel] : op->number, count);
    }
}

WIDE void
chain_pixels(const Chain *chain, const float *src, float *dst, int64_t begin, int64_t end)
{
    for (int64_t p = begin; p < end; p++)
        apply_all(chain, src + p * chain->src_row, dst + p * chain->dst_row, p);
}

void
turn_pixels(const Chain *chain, const float *src, float *dst, int64_t begin, int64_t end)
{
    enum { BLOCK = 64 };
    for (int64_t p = begin; p < end; p += BLOCK) {
        const int64_t last = p + BLOCK < end ? p + BLOCK : end;
        for (int64_t c = 0; c < chain->channels; c++)
            for (int64_t i = p; i < last; i++)
                dst[i * chain->dst_row + c] = src[c * chain->pixels + i];
    }
}

/* `count` floats of `terms`, combined in order. Two and three are read at once and stored once. */
INLINE void
combine(int sums, float *restrict to, const float *const *terms, int number, int64_t count)
{
    const float *a = terms[0], *b = terms[1], *c = terms[2];
    if (number == 1)
        memcpy(to, a, (size_t)count * sizeof *to);
    else if (number == 2 && sums)
        for (int64_t i = 0; i < count; i++)
            to[i] = a[i] + b[i];
    else if (number == 2)
        for (int64_t i = 0; i < count; i++)
            to[i] = maximum(a[i], b[i]);
    else if (sums)
        for (int64_t i = 0; i < count; i++)
            to[i] = a[i] + b[i] + c[i];
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = maximum(maximum(a[i], b[i]), c[i]);
    for (int k = 3; k < number; k++)
        for (int64_t i = 0; i < count; i++)
            to[i] = sums ? to[i] + terms[k][i] : maximum(to[i], terms[k][i]);
}

/* Windows of at most so many rows or columns are combined at once; the rest of a longer one follows. */
enum { MOST_TERMS = 16 };

/* `number` rows of `count` floats, `step` apart, combined in order. */
INLINE void
combine_rows(int sums, float *restrict to, const float *from, int64_t step, int64_t number, int64_t count)
{
    const float *terms[MOST_TERMS] = {from, from, from};
    int64_t taken = number < MOST_TERMS ? number : MOST_TERMS;
    for (int64_t k = 0; k < taken; k++)
        terms[k] = from + k * step;
    combine(sums, to, terms, (int)taken, count);
    for (; taken < number; taken++)
        for (int64_t i = 0; i < count; i++)
            to[i] = sums ? to[i] + from[taken * step + i] : maximum(to[i], from[taken * step + i]);
}

/* From where to where, exclusive, a window lies in the image. */
INLINE int64_t
first_of(int64_t at)
{
    return at < 0 ? 0 : at;
}

INLINE int64_t
last_of(int64_t at, int64_t kernel, int64_t size)
{
    return at + kernel < size ? at + kernel : size;
}

WIDE void
pool_rows(const Pool *p, const Chain *chain, const float *src, float *dst, float *room, int64_t begin, int64_t end)
{
    const float nothing = p->sums ? 0.0f : -INFINITY;
    const int64_t row_step = p->iw * p->src_row, c = p->c;
    const int64_t pieces = p->src_row == c ? 1 : p->iw, piece = p->src_row == c ? p->iw * c : c;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / p->oh, top = row % p->oh * p->stride[0] - p->pad[0];
        const int64_t y = first_of(top), rows = last_of(top, p->kernel[0], p->ih) - y;
        for (int64_t x = 0; rows > 0 && x < pieces; x++)
            combine_rows(p->sums, room + x * piece, src + (n * p->ih + y) * row_step + x * p->src_row, row_step, rows, piece);
        for (int64_t x = 0; x < p->ow; x++) {
            const int64_t left = x * p->stride[1] - p->pad[1], pixel = row * p->ow + x;
            const int64_t k = first_of(left), columns = rows > 0 ? last_of(left, p->kernel[1], p->iw) - k : 0;
            float *to = dst + pixel * p->dst_row;
            if (columns > 0)
                combine_rows(p->sums, to, room + k * c, c, columns, c);
            for (int64_t i = 0; columns <= 0 && i < c; i++)
                to[i] = nothing;
            apply_all(chain, to, to, pixel);
        }
    }
}

WIDE void
sum_pixels(const Chain *chain, const float *src, float *dst, int64_t begin, int64_t end)
{
    Chain part = *chain;
    part.channels = end - begin;
    for (int k = 0; k < part.count; k++)
        if (part.ops[k].by == BY_CHANNEL || part.ops[k].by == BY_ELEMENT)
            part.ops[k].values += begin;
    /* Sums of so many pixels each are added up, which rounds less often than one long sum. */
    enum { SOME = 16, BLOCK = 256 };
    for (int64_t c = begin; c < end; c += BLOCK) {
        const int64_t count = c + BLOCK < end ? BLOCK : end - c;
        float few[BLOCK], *restrict to = dst + c;
        for (int64_t p = 0; p < chain->pixels; p += SOME) {
            const int64_t last = p + SOME < chain->pixels ? p + SOME : chain->pixels;
            float *restrict sum = p ? few : to;
            memcpy(sum, src + p * chain->src_row + c, (size_t)count * sizeof *sum);
            for (int64_t q = p + 1; q < last; q++) {
                const float *from = src + q * chain->src_row + c;
                for (int64_t i = 0; i < count; i++)
                    sum[i] += from[i];
            }
            for (int64_t i = 0; p && i < count; i++)
                to[i] += few[i];
        }
    }
    apply_all(&part, dst + begin, dst + begin, 0);
}

/* e to the power of x <= 0: 2^n e^r with |r| <= log(2)/2. ln 2 is taken off in two parts, the first of which times n is
   exact; six terms of the series, with Cephes' coefficients for the last ones, keep within two units of the last place. */
INLINE float
exponential(float x)
{
    const float least = -87.0f, shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float in = x < least ? least : x;
    const float biased = in * 1.44269504088896341f + shift, n = biased - shift;
    const float r = in - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        float number;
        uint32_t bits;
    } power = {.number = biased};
    power.bits = (power.bits + 127) << 23; /* the lowest bits of `biased` are n */
    return x < least ? 0.0f : p * power.number;
}

WIDE void
softmax(const float *src, float *dst, int64_t count)
{
    enum { LANES = 16 };
    float greatest = src[0], sums[LANES] = {0}, most[LANES], sum = 0.0f;
    const int64_t whole = count - count % LANES;
    for (int i = 0; i < LANES; i++)
        most[i] = greatest;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++)
            most[k] = maximum(most[k], src[i + k]);
    for (int64_t i = whole; i < count; i++)
        most[i - whole] = maximum(most[i - whole], src[i]);
    for (int i = 0; i < LANES; i++)
        greatest = maximum(greatest, most[i]);
    for (int64_t i = 0; i < count; i++)
        dst[i] = exponential(src[i] - greatest);
    for (int64_t i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++)
            sums[k] += dst[i + k];
    for (int64_t i = whole; i < count; i++)
        sums[i - whole] += dst[i];
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    for (int64_t i = 0; i < count; i++)
        dst[i] = dst[i] / sum;
}
