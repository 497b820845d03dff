/* A product of two matrices, row by row in memory: `left [m, k]` times `right [k, n]`, float32. */

#ifndef PODRUN_PRODUCT_H
#define PODRUN_PRODUCT_H

#include <stdint.h>

typedef struct {
    int64_t left_turned, right_turned; /* the operand lies as [k, m], as [n, k] */
    int64_t m, n, k;
    int64_t adds; /* the product is added to a matrix */
    int64_t place; /* the place that takes the result, if the calling thread has given it; 0: none has */
    int64_t follows; /* what is done with each element, in this order */
} Product;

/* + bias [n]; max(., 0), where what is no number stays; 0 where mask [m, n] is not greater than 0. Not beside `adds`. */
enum { WITH_BIAS = 1, WITH_CUT = 2, WITH_MASK = 4, FOLLOWS = 8 };

/* What a product reads beside its operands, NULL where it does not. `addend` may be the result. */
typedef struct {
    const float *addend, *bias, *mask;
} Beside;

/* Memory for results, by the number of their place from 1 on, which is filled in place of what XLA gives. */
enum { MOST_PLACES = 63 };
typedef struct {
    float *memory[MOST_PLACES + 1];
    int64_t elements[MOST_PLACES + 1];
} Places;

/* Give the calling thread's products these places from now on; NULL: none. Gives which were filled since the last call, a
   bit for each. */
uint64_t places_give(const Places *places);

/* Forget which products have the same bits whole, while nothing computes. */
void product_forget(void);

/* Where the result of a product goes, which XLA would have in `result`: said to be filled if that is a place. */
float *place_of(const Product *p, float *result);

/* Compute it in so many parts. NULL, or what is wrong.
   The bits follow from the product alone. No other thread helps one that keeps to a core: machines do so where every core
   has a machine. Such a thread does not divide a product of a form that has the same bits whole, and a product of few
   rows is halves of columns if its form has the same bits so. */
const char *product_compute(const Product *p, const float *left, const float *right, const Beside *beside, float *result,
                            int parts);

#endif
