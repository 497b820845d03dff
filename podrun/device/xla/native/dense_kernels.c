/* What steps of dense.c compute element by element, and sums. See dense.h.

   Exponentials and logarithms are computed in float64 and rounded once, so nearly all are the float32 next to the exact
   value, on every processor alike. */

#include "dense.h"

#include <string.h>

enum { WIDE = 64, RUN = 32 };
typedef float Vector __attribute__((vector_size(64)));

#define INLINE static inline __attribute__((always_inline))

INLINE double
of_bits(int64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int64_t
bits_of(double value)
{
    int64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* e to the power of what a float32 holds: 2^n e^r, |r| at most half of log 2; a Taylor polynomial errs by 2e-10 there. */
INLINE double
exponential(double x)
{
    const double shift = 0x1.8p52;
    x = x < -120.0 ? -120.0 : x;
    x = x > 120.0 ? 120.0 : x;
    const double t = x * 0x1.71547652b82fep0 + shift, n = t - shift;
    const double r = x - n * 0x1.62e42fefa3800p-1 - n * 0x1.ef35793c76730p-45;
    double p = 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * of_bits((bits_of(t) << 52) + ((int64_t)1023 << 52));
}

/* The logarithm: n log 2 + log m, m between the roots of 1/2 and 2, by the series of the inverse hyperbolic tangent. */
INLINE double
logarithm(double x)
{
    const int64_t bits = bits_of(x), low = 0x3fe6a09e667f3bcd, n = (bits - low) >> 52;
    const double m = of_bits(bits - (n << 52)), f = (m - 1.0) / (m + 1.0), s = f * f;
    double p = 1.0 / 13;
    p = p * s + 1.0 / 11;
    p = p * s + 1.0 / 9;
    p = p * s + 1.0 / 7;
    p = p * s + 1.0 / 5;
    p = p * s + 1.0 / 3;
    p = p * s + 1.0;
    double y = (double)(int32_t)n * 0x1.62e42fefa39efp-1 + 2.0 * f * p;
    y = x == 0.0 ? -__builtin_inf() : y;
    y = x < 0.0 ? __builtin_nan("") : y;
    return x == __builtin_inf() || x != x ? x : y;
}

INLINE double
tangent(double x)
{
    const double e = exponential(-2.0 * __builtin_fabs(x)), y = (1.0 - e) / (1.0 + e);
    const double near = x * (1.0 - x * x * (1.0 / 3)); /* the difference above loses what the polynomial has beyond 1e-10 */
    return __builtin_fabs(x) < 0x1p-9 ? near : __builtin_copysign(y, x);
}

/* The larger of two, or what is no number; of zeros +0 is larger, as for XLA. Equal numbers else have equal bits. */
INLINE float
larger(float a, float b)
{
    int32_t p, q;
    memcpy(&p, &a, sizeof p), memcpy(&q, &b, sizeof q);
    const int32_t same = p & q, bits = a > b || a != a ? p : a == b ? same : q;
    memcpy(&a, &bits, sizeof a);
    return a;
}

INLINE float
smaller(float a, float b)
{
    int32_t p, q;
    memcpy(&p, &a, sizeof p), memcpy(&q, &b, sizeof q);
    const int32_t same = p | q, bits = a < b || a != a ? p : a == b ? same : q;
    memcpy(&a, &bits, sizeof a);
    return a;
}

#define NAME(PART) plain_##PART
#define TARGET
#include "dense_kernel.h"

#define NAME(PART) narrow_##PART
#define TARGET __attribute__((target("avx2")))
#include "dense_kernel.h"

#define NAME(PART) wide_##PART
#define TARGET __attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512")))
#include "dense_kernel.h"

const DenseKernels *
dense_kernels(int lanes)
{
    static const DenseKernels plain = {plain_map, plain_reduce}, narrow = {narrow_map, narrow_reduce}, wide = {wide_map, wide_reduce};
    return lanes >= 16 ? &wide : lanes >= 8 ? &narrow : &plain;
}
