/* A convolution or one of its gradients: `src [N, IH, IW, C]`, `weights` in any order, `dst [N, OH, OW, M]`, float32. */

#ifndef PODRUN_CONVOLUTION_H
#define PODRUN_CONVOLUTION_H

#include <stddef.h>
#include <stdint.h>

enum { FORWARD, OF_SRC, OF_WEIGHTS };   /* kinds: which of dst, src and weights is the result */
enum { BIAS = 1, OTHER = 2, CUT = 4 };  /* what follows a forward one: + bias [M], + other [N, OH, OW, M], max(., 0) */
enum { PACKED = 8 };                    /* beside these in a call's numbers: the weights are as convolution_pack left them */

typedef struct {
    int64_t kind, follows, groups, n, ih, iw, c, oh, ow, m, kh, kw, stride[2], dilation[2], pad[2];
    int64_t order[5]; /* elements between neighbours in the weights: groups, outputs, inputs, rows, columns */
    int64_t shuffle; /* the result's channels are a matrix of so many rows, which is stored transposed; 1: as it is */
    int64_t src_row, dst_row; /* elements between neighbouring pixels: all channels, of which c and m are a part */
} Convolution;

typedef struct {
    float *src, *weights, *dst;
    const float *bias, *other;
    int packed; /* the weights of a forward one are as convolution_pack left them */
} Arrays;

enum { CONVOLUTION_NUMBERS = 25, MOST_PARTS = 2 };

/* How a convolution is called: into how many parts it is divided, and whether its weights are packed. */
typedef struct {
    int parts, packed;
} Manner;

/* A convolution from its numbers, the fields up to `order`, and the manner of the call. Not 0: they describe none. */
int convolution_decode(const int64_t *numbers, size_t count, Convolution *c, Manner *manner);

/* Compute it in so many parts, by at most as many threads. NULL, or what is wrong. The parts follow from the convolution
   alone, and so do the bits. */
const char *convolution_compute(const Convolution *c, const Arrays *arrays, int parts);

/* Bring the weights of a forward one into the order in which the parts read them, in at most `bytes`. NULL, or why that is
   not possible. */
const char *convolution_pack(const Convolution *c, int parts, const float *weights, float *packed, size_t bytes);

/* Make what computing it takes. NULL, or what is wrong; `names` tells which of the library's algorithms were chosen. */
const char *convolution_prepare(const Convolution *c, int parts, char *names, int size);

/* For calls that are repeated: the plans of the parts of a forward one, to be given back, and how many parts there are. 0:
   there are none, `*error` says why. */
typedef struct Plan Plan;
int convolution_take(const Convolution *c, int parts, Plan **plans, const char **error);

/* Elements of the weights that these parts read. */
int64_t convolution_weights(const Convolution *c, int parts, int packed, Plan *const *plans);

/* One of its parts with these plans, in this thread, between plan_enter and plan_leave. NULL, or what is wrong. */
const char *convolution_compute_part(const Convolution *c, const Arrays *arrays, int parts, int part, Plan *const *plans);

#endif
