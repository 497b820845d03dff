/* Loops that are compiled for several instruction sets, and the processor's mode for denormal numbers.

   `WITH(FEATURES)` before a function compiles it for these, with the `INLINE` functions that it calls. `MODE` and
   `SET_MODE` read and set the mode of this thread; a mode with `FLUSHES` takes denormal numbers as zero, as XLA does. */

#ifndef PODRUN_PROCESSOR_MODES_H
#define PODRUN_PROCESSOR_MODES_H

#if defined(__x86_64__)
#include <immintrin.h>
enum { FLUSHES = 0x8040 }; /* denormal results and operands as zero */
#define MODE() _mm_getcsr()
#define SET_MODE(mode) _mm_setcsr(mode)
#else
enum { FLUSHES = 0 };
#define MODE() 0u
#define SET_MODE(mode) ((void)(mode))
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define WITH(FEATURES) __attribute__((noinline, target(FEATURES)))
#else
#define WITH(FEATURES) __attribute__((noinline))
#endif
#define INLINE static inline __attribute__((always_inline))

#endif
