/* Networks: chains of steps over images `[N, H, W, C]` of float32, computed in one call. */

#ifndef PODRUN_NETWORK_H
#define PODRUN_NETWORK_H

#include <stddef.h>
#include <stdint.h>

/* What the steps read and write: operands, then results, then an arena of the call's own. Each place in them is two
   numbers, the buffer's and the element's. The first number of a network is the count of operands, the second that of
   results, the third the arena's elements. A step is: its kind, how many steps have to be done before it, the count of
   numbers that follow, and these (network.c). */
enum { STEP_CONVOLVE, STEP_POOL, STEP_CHAIN, STEP_TURN, STEP_SUM, STEP_SOFTMAX, STEP_PLANES, STEPS };
enum { OP_ADD, OP_SUBTRACT, OP_MULTIPLY, OP_DIVIDE, OP_MAXIMUM, OP_CUT }; /* of a value and another one; CUT: x > 0 ? x : 0 */
enum { BY_NUMBER, BY_CHANNEL, BY_PIXEL, BY_ELEMENT };                       /* which others: of how many values */

typedef struct Network Network;

/* The network of these numbers, kept for later calls, to be given back. NULL: `*error` says why there is none. */
Network *network_take(const int64_t *numbers, size_t count, const char **error);
void network_give_back(Network *network);

size_t network_operands(const Network *network);
size_t network_results(const Network *network);

/* Elements that the steps reach in a buffer. */
int64_t network_reach(const Network *network, size_t buffer);

/* Compute it in this thread and one that helps. `buffers`: operands, then results. NULL, or what is wrong. */
const char *network_run(const Network *network, float *const *buffers);

/* Around a fork, so that no other thread is in the middle of taking a network. */
void networks_hold(void);
void networks_release(void);

#endif
