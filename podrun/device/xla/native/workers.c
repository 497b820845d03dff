/* See workers.h.

   One queue, one lock. A caller puts its job there, runs parts of it itself, and leaves only when none is left or being
   run; so a job may lie on the caller's stack, and a caller never waits for a thread that has not started on its work.
   Threads are started when there is work for them and live as long as the process. They look for work for a moment
   before they sleep, if there is a core for it.

   A forked child has no threads but the one that forked, and begins anew with an empty queue. At the process's end the
   library's memory must not go while a thread computes: from then on nothing new begins, and what was begun is waited
   for. */

#define _GNU_SOURCE
#include "workers.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MOST_WORKERS = 8, LOOKS = 4000 }; /* a look takes some 30 ns */

typedef struct Job {
    void (*part)(void *, int);
    void *what;
    int count, next;
    int left; /* parts that have not returned; written with the lock held, read without */
    pthread_cond_t done;
    struct Job *after;
} Job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static Job *first;
static int waiting; /* jobs in the queue; read without the lock by threads that look */
static int callers, workers, idle, busy, cores, ending;
static void (*hold_others)(void), (*release_others)(void);

/* The next part of a job, which leaves the queue with its last one. With the lock held. */
static int
claim(Job *job)
{
    const int i = job->next++;
    if (job->next == job->count) {
        Job **at = &first;
        while (*at && *at != job)
            at = &(*at)->after;
        if (*at) {
            *at = job->after;
            __atomic_sub_fetch(&waiting, 1, __ATOMIC_RELAXED);
        }
    }
    return i;
}

/* Run a part with the lock given back meanwhile. */
static void
run_part(Job *job)
{
    const int i = claim(job);
    busy++;
    pthread_mutex_unlock(&lock);
    job->part(job->what, i);
    pthread_mutex_lock(&lock);
    busy--;
    if (__atomic_sub_fetch(&job->left, 1, __ATOMIC_RELEASE) == 0)
        pthread_cond_signal(&job->done);
}

static void
look(const int *word, int least)
{
    for (int i = 0; cores > 1 && i < LOOKS && __atomic_load_n(word, __ATOMIC_ACQUIRE) != least; i++)
        __builtin_ia32_pause();
}

static void *
worker(void *unused)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!first) {
            idle++;
            pthread_mutex_unlock(&lock);
            for (int i = 0; cores > 1 && i < LOOKS && !__atomic_load_n(&waiting, __ATOMIC_ACQUIRE); i++)
                __builtin_ia32_pause();
            pthread_mutex_lock(&lock);
            if (!first)
                pthread_cond_wait(&work, &lock);
            idle--;
        }
        run_part(first);
    }
    return unused;
}

void
signals_hold(sigset_t *before)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    sigset_t most;
    sigfillset(&most);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(&most, faults[i]);
    pthread_sigmask(SIG_SETMASK, &most, before);
}

/* Another thread, which may use all cores of the process and takes none of its signals. */
static void
start_worker(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    cpu_set_t all;
    sigset_t before;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (!sched_getaffinity(getpid(), sizeof all, &all))
        pthread_attr_setaffinity_np(&attributes, sizeof all, &all);
    signals_hold(&before);
    if (!pthread_create(&thread, &attributes, worker, NULL))
        workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static void
count_cores(void)
{
    cpu_set_t all;
    cores = sched_getaffinity(getpid(), sizeof all, &all) ? 1 : CPU_COUNT(&all);
}

int
workers_cores(void)
{
    return cores;
}

void
workers_run(void (*part)(void *, int), void *what, int count)
{
    Job job = {.part = part, .what = what, .count = count, .left = count, .done = PTHREAD_COND_INITIALIZER};
    pthread_mutex_lock(&lock);
    while (ending)
        pthread_cond_wait(&job.done, &lock); /* for ever: the process ends */
    if (!cores)
        count_cores();
    callers++;
    /* Others help only where there is a core for them. */
    if (count > 1 && callers < 2 + (cores > 3 ? cores / 2 : 0)) {
        Job **at = &first;
        while (*at)
            at = &(*at)->after;
        *at = &job;
        __atomic_add_fetch(&waiting, 1, __ATOMIC_RELEASE);
        if (idle)
            pthread_cond_signal(&work);
        else if (workers < MOST_WORKERS && workers < callers)
            start_worker();
    }
    while (job.next < job.count)
        run_part(&job);
    if (job.left) {
        pthread_mutex_unlock(&lock);
        look(&job.left, 0);
        pthread_mutex_lock(&lock);
    }
    while (job.left)
        pthread_cond_wait(&job.done, &lock);
    callers--;
    pthread_mutex_unlock(&lock);
}

static void
before_fork(void)
{
    pthread_mutex_lock(&lock);
    hold_others();
}

static void
in_parent(void)
{
    release_others();
    pthread_mutex_unlock(&lock);
}

static void
in_child(void)
{
    first = NULL;
    waiting = callers = workers = idle = busy = cores = 0;
    pthread_cond_init(&work, NULL);
    release_others();
    pthread_mutex_unlock(&lock);
}

static void
at_end(void)
{
    pthread_mutex_lock(&lock);
    ending = 1;
    for (int i = 0; busy && i < 5000; i++) {
        const struct timespec moment = {0, 1000000};
        pthread_mutex_unlock(&lock);
        nanosleep(&moment, NULL);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
}

void
workers_start(void (*hold)(void), void (*release)(void))
{
    hold_others = hold;
    release_others = release;
    pthread_atfork(before_fork, in_parent, in_child);
    atexit(at_end);
}
