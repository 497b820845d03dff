/* Threads that help a calling thread with the parts of its work. */

#ifndef PODRUN_WORKERS_H
#define PODRUN_WORKERS_H

#include <signal.h>

/* Call `part(what, i)` for i from 0 to count - 1, each once, in this thread and in others that have nothing to do; all
   have returned when this returns. Who runs a part, and when, is open: parts must not depend on it. */
void workers_run(void (*part)(void *what, int i), void *what, int count);

/* Cores that the process may use, once something was run. */
int workers_cores(void);

/* Let no signal reach the calling thread but those of its own faults; `before` takes what was held back until then. */
void signals_hold(sigset_t *before);

/* Prepare for forks and for the process's end. Once in a process. */
void workers_start(void (*hold)(void), void (*release)(void));

#endif
