/* Training steps of dense networks: products, what is computed element by element between them, and sums, as one call. */

#ifndef PODRUN_DENSE_H
#define PODRUN_DENSE_H

#include <stdint.h>

/* What a step does with elements of four bytes: float32 (or as said int32; true is the int32 1). */
enum { MAP, REDUCE, PRODUCT, PICK, ADD_AT, COUNT_UP, DENSE_STEPS };

/* Operations of MAP. */
enum {
    D_COPY, D_ADD, D_SUBTRACT, D_MULTIPLY, D_DIVIDE, D_MAXIMUM, D_MINIMUM, D_NEGATE, D_EXPONENTIAL, D_LOG, D_SQRT,
    D_TANH, D_LOGISTIC, D_SELECT, D_FLOAT, /* of an int32 */
    D_EQ, D_NE, D_LT, D_LE, D_GT, D_GE, /* of float32 */
    D_INT_EQ, D_INT_NE, D_INT_LT, D_INT_LE, D_INT_GT, D_INT_GE, D_INT_ADD, D_AND, D_OR, D_NOT, /* of int32, truths */
    DENSE_OPERATIONS
};

/* Operations of REDUCE: of float32, and of truths. */
enum { SUM, LARGEST, ALL, ANY_OF, DENSE_REDUCTIONS };

enum { DENSE_BLOCK = 512 }; /* elements that MAP computes at a time */

/* Compute elements of a block; operands that an operation does not have are not read. `out` may be an operand. */
typedef void (*DenseMap)(int64_t operation, const float *a, const float *b, const float *c, float *out, int64_t n);

/* src [outer, count, inner] to dst [outer, inner]. The order of a sum depends on these sizes alone. */
typedef void (*DenseReduce)(int64_t operation, const float *src, int64_t outer, int64_t count, int64_t inner, float *dst);

typedef struct {
    DenseMap map;
    DenseReduce reduce;
} DenseKernels;

/* Those for vectors of so many elements: 16, 8 or, whatever the processor, 0. All give the same bits. */
const DenseKernels *dense_kernels(int lanes);

#endif
