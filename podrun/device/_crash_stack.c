/* Reports which pieces were being computed when native code dies in a process.
 *
 * `podrun.device.crash_records` keeps them in memory of fixed layout: slots of equal size, each two int64 and texts. The
 * first is 0, or where in the slot the text of the piece under way begins (it ends with a NUL); the second is the batch.
 * The handlers below write the texts to a file descriptor and leave the rest to the handlers that were there before,
 * as Python's faulthandler, whose stacks follow.
 *
 * Everything in a handler may run at any moment in any thread: only write, sigaction and raise are called.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_TEXT = 2048, SIGNAL_STACK_BYTES = 1 << 18 };

static const struct {
    int number;
    const char *name;
} SIGNALS[] = {
    {SIGSEGV, "SIGSEGV"}, {SIGABRT, "SIGABRT"}, {SIGILL, "SIGILL"}, {SIGBUS, "SIGBUS"}, {SIGFPE, "SIGFPE"},
};
enum { COUNT = sizeof SIGNALS / sizeof SIGNALS[0] };

static struct sigaction before[COUNT];
static Py_buffer memory;
static Py_ssize_t slot_bytes;
static int output = -1;
static pid_t speaker; /* not what is forked from it */
static char before_stacks[MOST_TEXT], after_stacks[MOST_TEXT];
static volatile sig_atomic_t spoken;

static void say(const char *text, size_t length)
{
    while (length) {
        ssize_t written = write(output, text, length);
        if (written <= 0)
            return;
        text += written;
        length -= (size_t)written;
    }
}

static void say_number(int64_t number)
{
    char digits[24];
    size_t place = sizeof digits;
    uint64_t left = number < 0 ? 0 : (uint64_t)number;
    do {
        digits[--place] = (char)('0' + left % 10);
        left /= 10;
    } while (left);
    say(digits + place, sizeof digits - place);
}

static void tell(int number)
{
    int said = 0;
    for (Py_ssize_t start = 0; start + slot_bytes <= memory.len; start += slot_bytes) {
        const char *slot = (const char *)memory.buf + start;
        int64_t cells[2];
        memcpy(cells, slot, sizeof cells);
        if (cells[0] < (int64_t)sizeof cells || cells[0] >= slot_bytes)
            continue;
        if (!said++) {
            say(before_stacks, strlen(before_stacks));
            for (int i = 0; i < COUNT; i++)
                if (SIGNALS[i].number == number)
                    say(SIGNALS[i].name, strlen(SIGNALS[i].name));
            say(" while it computed\n", 19);
        }
        say("  ", 2);
        say(slot + cells[0], strnlen(slot + cells[0], (size_t)(slot_bytes - cells[0])));
        say(", batch ", 8);
        say_number(cells[1]);
        say("\n", 1);
    }
    if (said)
        say(after_stacks, strlen(after_stacks));
}

static void handle(int number, siginfo_t *info, void *context)
{
    if (!spoken && getpid() == speaker) {
        spoken = 1;
        tell(number);
    }
    for (int i = 0; i < COUNT; i++) {
        if (SIGNALS[i].number != number)
            continue;
        if (before[i].sa_flags & SA_SIGINFO) {
            before[i].sa_sigaction(number, info, context);
        } else if (before[i].sa_handler != SIG_DFL && before[i].sa_handler != SIG_IGN) {
            before[i].sa_handler(number);
        } else {
            sigaction(number, &before[i], NULL);
            raise(number);
        }
    }
}

static PyObject *install(PyObject *self, PyObject *arguments)
{
    Py_buffer given;
    Py_ssize_t bytes;
    int descriptor;
    const char *first, *last;
    if (!PyArg_ParseTuple(arguments, "y*niss", &given, &bytes, &descriptor, &first, &last))
        return NULL;
    if (bytes <= (Py_ssize_t)(2 * sizeof(int64_t)) || output >= 0) {
        PyBuffer_Release(&given);
        PyErr_SetString(PyExc_ValueError, "slots hold two numbers and texts, and handlers are installed once");
        return NULL;
    }
    memory = given; /* for as long as the process lives */
    slot_bytes = bytes;
    output = descriptor;
    speaker = getpid();
    strncpy(before_stacks, first, MOST_TEXT - 1);
    strncpy(after_stacks, last, MOST_TEXT - 1);
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = handle;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    for (int i = 0; i < COUNT; i++)
        sigaction(SIGNALS[i].number, &ours, &before[i]);
    Py_RETURN_NONE;
}

/* A handler cannot run on a stack that has overflowed: the kernel then ends the process without a word. Python gives
   another stack to the thread that enables faulthandler, and to no other. */

static pthread_key_t stack_key;
static pthread_once_t stack_once = PTHREAD_ONCE_INIT;
static int has_key;

static void free_stack(void *stack)
{
    const stack_t none = {.ss_flags = SS_DISABLE};
    sigaltstack(&none, NULL);
    free(stack);
}

static void make_key(void)
{
    has_key = !pthread_key_create(&stack_key, free_stack);
}

static PyObject *use_signal_stack(PyObject *self, PyObject *unused)
{
    stack_t stack;
    pthread_once(&stack_once, make_key);
    if (!has_key || pthread_getspecific(stack_key) || sigaltstack(NULL, &stack) || !(stack.ss_flags & SS_DISABLE))
        Py_RETURN_NONE;
    stack = (stack_t){.ss_sp = malloc(SIGNAL_STACK_BYTES), .ss_size = SIGNAL_STACK_BYTES};
    if (!stack.ss_sp || sigaltstack(&stack, NULL) || pthread_setspecific(stack_key, stack.ss_sp)) {
        const stack_t none = {.ss_flags = SS_DISABLE};
        sigaltstack(&none, NULL);
        free(stack.ss_sp);
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"use_signal_stack", use_signal_stack, METH_NOARGS,
     "use_signal_stack(): let handlers of signals run on a stack of their own in this thread, until it ends."},
    {"install", install, METH_VARARGS,
     "install(memory, slot_bytes, descriptor, before_stacks, after_stacks): write these texts around the stacks when a\n"
     "fatal signal comes."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_crash_stack", "Reports the piece under way when native code dies.", -1, METHODS,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__crash_stack(void) { return PyModule_Create(&MODULE); }
