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

INLINE void
combine(int sums, float *to, const float *from, int64_t count)
{
    if (sums)
        for (int64_t i = 0; i < count; i++)
            to[i] = to[i] + from[i];
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = maximum(to[i], from[i]);
}

/* Rows of the image `iw` pixels wide as one after the other in `to`. */
INLINE void
combine_row(const Pool *p, float *to, const float *from, int first)
{
    const int64_t pixels = p->src_row == p->c ? 1 : p->iw, count = p->src_row == p->c ? p->iw * p->c : p->c;
    for (int64_t x = 0; x < pixels; x++, to += count, from += p->src_row)
        if (first)
            memcpy(to, from, (size_t)count * sizeof *to);
        else
            combine(p->sums, to, from, count);
}

WIDE void
pool_rows(const Pool *p, const Chain *chain, const float *src, float *dst, float *room, int64_t begin, int64_t end)
{
    const float nothing = p->sums ? 0.0f : -INFINITY;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / p->oh, top = row % p->oh * p->stride[0] - p->pad[0];
        int rows = 0;
        for (int64_t y = top < 0 ? 0 : top; y < top + p->kernel[0] && y < p->ih; y++)
            combine_row(p, room, src + (n * p->ih + y) * p->iw * p->src_row, !rows++);
        for (int64_t x = 0; x < p->ow; x++) {
            const int64_t left = x * p->stride[1] - p->pad[1], pixel = row * p->ow + x;
            float *to = dst + pixel * p->dst_row;
            int columns = 0;
            for (int64_t k = left < 0 ? 0 : left; rows && k < left + p->kernel[1] && k < p->iw; k++)
                if (!columns++)
                    memcpy(to, room + k * p->c, (size_t)p->c * sizeof *to);
                else
                    combine(p->sums, to, room + k * p->c, p->c);
            for (int64_t i = 0; !columns && i < p->c; i++)
                to[i] = nothing;
            apply_all(chain, to, to, pixel);
        }
    }
}
