/* What the library makes for a convolution of one shape: kept, shared by threads, bounded in number. */

#ifndef PODRUN_PLANS_H
#define PODRUN_PLANS_H

#include <signal.h>
#include <stddef.h>

#include "convolution.h"

/* The plan of a convolution, made if need be, to be given back. NULL: the library has none, `*error` says why. */
Plan *plan_take(const Convolution *c, const char **error);
void plan_give_back(Plan *plan);

/* Which of the library's algorithms it is. */
const char *plan_name(const Plan *plan);

/* Bytes of the weights in the order that the plan wants; 0: it takes them as they are. */
size_t plan_packed(const Plan *plan);

/* Whether both want the same order. */
int plan_agrees(const Plan *plan, const Plan *other);

/* Bring weights into the order that the plan wants. NULL, or what is wrong. */
const char *plan_pack(const Plan *plan, float *weights, float *packed);

/* Run it in the calling thread, and in no other. NULL, or what is wrong. */
const char *plan_run(Plan *plan, const Arrays *arrays);

/* A buffer of the calling thread's own, 0, 1 or 2, for as long as no larger one is asked for. NULL without memory. */
float *scratch(int which, size_t bytes);

/* From now on a page that nobody may touch follows every buffer, so that writing or reading beyond it is a crash where it
   happens. Slow: for tests. Before the first plan. */
void scratch_guard(void);

/* Around the library's calls: one thread, denormal numbers are 0, whatever the calling thread had, and no signals. Products
   of the library use the stack pointer for its own memory: what is below that would be overwritten by a handler's frame. */
typedef struct {
    sigset_t signals;
    unsigned numbers;
    int threads;
} Before;
Before plan_enter(void);
void plan_leave(Before before);

/* Around a fork, so that no other thread is in the middle of making a plan. */
void plans_hold(void);
void plans_release(void);

#endif
