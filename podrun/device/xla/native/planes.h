/* A forward convolution of an image whose few channels lie in planes, `src [C, IH, IW]`, to pixels `dst [OH, OW, M]`: the first
   layer of most networks. The library wants its channels beside each other, or gives blocks of channels. */

#ifndef PODRUN_PLANES_H
#define PODRUN_PLANES_H

#include "convolution.h"
#include "layers.h"

enum { MOST_PLANES = 4, MOST_LANES = 16 };

/* Use the widest vectors of the instruction set to which the library keeps, of so many elements at most; gives how many those
   until now had. Once the library is loaded: later, processor and environment are not asked again, since a program may change
   the environment while other threads compute. */
int planes_vectors(int most);

/* How many elements they have; 0 for none, -1 before the library is loaded. */
int planes_lanes(void);

/* The same for loops of this module, 16 or 8, 0 for none: before the library is loaded, those of the processor. */
int vector_lanes(void);

/* Which functions to use of those compiled for any processor (0), AVX2 (1) and AVX-512 (2); from now on of this level at most. */
enum { LEVELS = 3 };
int instruction_level(void);
void limit_instructions(int most);

/* Whether there are such vectors, and whether it is one of these. */
int planes_can(void);
int planes_fit(const Convolution *c);

/* Rows of the result from `begin` to `end`, of which the first lies at the arrays' `dst`. The order of each element's sum is that of channels, rows and columns of the kernel,
   each product rounded with its sum, whatever the vectors. NULL, or what is wrong. */
const char *planes_rows(const Convolution *c, const Arrays *arrays, int64_t begin, int64_t end);

/* Rows of windows over the result, which is never stored as a whole. `dst`: where the first of the windows' image lies. */
const char *planes_pooled(const Convolution *c, const Arrays *arrays, const Pool *pool, const Chain *chain, float *dst,
                          int64_t begin, int64_t end);

#endif
