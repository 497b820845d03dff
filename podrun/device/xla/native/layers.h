/* What networks compute beside convolutions: chains of operations on elements, pooling, another order of axes. */

#ifndef PODRUN_LAYERS_H
#define PODRUN_LAYERS_H

#include <stdint.h>

enum { MOST_OPS = 8 };

/* An operation on each value of an image: another value of `values`, or `number`. */
typedef struct {
    int op, by; /* of network.h */
    int64_t row;
    float number;
    const float *values;
} Op;

/* Operations one after the other. Rows: elements between neighbouring pixels. */
typedef struct {
    int count;
    int64_t pixels, channels, src_row, dst_row;
    Op ops[MOST_OPS];
} Chain;

/* Maxima or sums of windows: each column of a window first, then these. Padding is left out. */
typedef struct {
    int sums;
    int64_t n, ih, iw, c, oh, ow, kernel[2], stride[2], pad[2], src_row, dst_row;
} Pool;

/* Pixels from `begin` to `end` of the result. */
void chain_pixels(const Chain *chain, const float *src, float *dst, int64_t begin, int64_t end);

/* Pixels of `src [C, P]` as `dst [P, C]`. */
void turn_pixels(const Chain *chain, const float *src, float *dst, int64_t begin, int64_t end);

/* Sums of an image's pixels, in order, for channels from `begin` to `end`, with a chain of operations after them. */
void sum_pixels(const Chain *chain, const float *src, float *dst, int64_t begin, int64_t end);

/* exp(src - m) / s of so many values: m is their maximum, s the sum of the numerators. */
void softmax(const float *src, float *dst, int64_t count);

/* Rows of the result, with a chain of operations after them. `room`: a row of the image. */
void pool_rows(const Pool *pool, const Chain *chain, const float *src, float *dst, float *room, int64_t begin, int64_t end);

#endif
