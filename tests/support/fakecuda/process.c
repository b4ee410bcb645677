/* The process's side of the driver: settings, the log, injected errors and delays, cuInit, devices. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialized; /* the process that has called cuInit */
static int sticky;        /* the error of a dead context */
static int log_fd = STDERR_FILENO, tracing;
static char state_path[PATH_MAX];
const char *fake_state = state_path;

int fake_on(const char *setting) {
    const char *value = getenv(setting);
    return value && *value && *value != '0';
}

int fake_devices(void) {
    const char *value = getenv("FAKE_CUDA_DEVICES");
    int count = value ? atoi(value) : 1;
    return count < MAX_DEVICES ? count : MAX_DEVICES;
}

size_t fake_capacity(void) {
    const char *value = getenv("FAKE_CUDA_MEM");
    return value ? strtoull(value, NULL, 0) : (size_t)1 << 30;
}

int fake_physical(int ordinal) {
    if (ordinal < 0 || ordinal >= fake_devices()) return -1;
    const char *order = getenv("FAKE_CUDA_ORDER");
    for (int i = 0; order && i < ordinal; i++)
        if ((order = strchr(order, ','))) order++;
    return order ? atoi(order) : ordinal;
}

/* --- the log --- */

static void say(const char *before, const char *format, va_list arguments) {
    char line[1024];
    int length = snprintf(line, sizeof line, "fakecuda[%d] %s", (int)getpid(), before);
    length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (write(log_fd, line, length) < 0) abort(); /* a test must not pass because its log is full */
}

void fake_say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say("", format, arguments);
    va_end(arguments);
}

Result fake_misuse(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    say("MISUSE ", format, arguments);
    va_end(arguments);
    if (fake_on("FAKE_CUDA_STRICT")) abort();
    return error;
}

/* --- injected errors and delays --- */

/* "name@2=999,other@*=2": the error for this call of `function`, counted here, or OK. */
static int injected(const char *function) {
    static struct {
        char function[48];
        int calls;
    } counts[64];
    int slot = 0;
    while (slot < 63 && counts[slot].function[0] && strcmp(counts[slot].function, function)) slot++;
    snprintf(counts[slot].function, sizeof counts[slot].function, "%s", function);
    counts[slot].calls++;
    for (const char *at = getenv("FAKE_CUDA_FAIL"); at && *at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        char name[48], call[16];
        int error;
        if (sscanf(at, "%47[^@]@%15[^=]=%d", name, call, &error) != 3) abort(); /* a test's mistake */
        if (!strcmp(name, function) && (*call == '*' || atoi(call) == counts[slot].calls)) return error;
    }
    return OK;
}

/* "name=300,other=5": how many milliseconds a call of `function` takes. */
static int delay_ms(const char *function) {
    for (const char *at = getenv("FAKE_CUDA_DELAY"); at && *at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        char name[48];
        int ms;
        if (sscanf(at, "%47[^=]=%d", name, &ms) != 2) abort(); /* a test's mistake */
        if (!strcmp(name, function)) return ms;
    }
    return 0;
}

Result fake_enter(const char *function, int needs_init) {
    char name[48];
    snprintf(name, sizeof name, "%s", function);
    char *version = strstr(name, "_v2");
    if (version) *version = '\0';
    int ms = delay_ms(name);
    if (ms) nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL); /* without the lock: others go on */
    pthread_mutex_lock(&lock);
    int error = injected(name);
    if (tracing) fake_say("%s%s", name, error ? " (injected error)" : "");
    if (error) return error;
    if (!needs_init) return OK;
    if (!initialized) return fake_misuse(NOT_INITIALIZED, "%s before cuInit", name);
    if (initialized != getpid()) return fake_misuse(NOT_INITIALIZED, "%s in a forked child", name);
    return sticky;
}

void fake_leave(int *entered) {
    (void)entered;
    pthread_mutex_unlock(&lock);
}

Result fake_fault(int error) {
    return sticky = error;
}

/* --- the calls --- */

API cuInit(unsigned flags) {
    ENTER(0);
    NEED(!flags, "cuInit flags %u", flags);
    if (initialized == getpid()) return OK;
    if (initialized) return fake_misuse(NOT_INITIALIZED, "cuInit in a forked child");
    if (fake_devices() < 1) return NO_DEVICE;
    const char *state = getenv("FAKE_CUDA_STATE");
    if (!state || !realpath(state, state_path)) return fake_misuse(UNKNOWN, "FAKE_CUDA_STATE is no folder");
    initialized = getpid();
    return OK;
}

API cuDriverGetVersion(int *version) {
    ENTER(0);
    *version = 13000;
    return OK;
}

API cuDeviceGetCount(int *count) {
    ENTER(1);
    *count = fake_devices();
    return OK;
}

API cuDeviceGet(int *device, int ordinal) {
    ENTER(1);
    if (fake_physical(ordinal) < 0) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

API cuDeviceGetName(char *name, int size, int device) {
    ENTER(1);
    if (fake_physical(device) < 0) return INVALID_DEVICE;
    snprintf(name, size, "Fake GPU %d", fake_physical(device));
    return OK;
}

API cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    ENTER(1);
    if (fake_physical(device) < 0) return INVALID_DEVICE;
    memcpy(uuid, "fakecuda\0\0\0\0\0\0\0", 15);
    uuid[15] = fake_physical(device);
    return OK;
}

API cuDeviceTotalMem_v2(size_t *size, int device) {
    ENTER(1);
    if (fake_physical(device) < 0) return INVALID_DEVICE;
    *size = fake_capacity();
    return OK;
}

API cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(1);
    if (fake_physical(device) < 0) return INVALID_DEVICE;
    for (const char *at = getenv("FAKE_CUDA_ATTRIBUTES"); at && *at; at = strchr(at, ','), at = at ? at + 1 : NULL) {
        int number;
        if (sscanf(at, "%d=%d", &number, value) == 2 && number == attribute) return OK;
    }
    switch (attribute) {
    case 16:  /* multiprocessors */
    case 102: /* virtual memory management */
    case 103: /* handles as POSIX file descriptors */
        *value = 1;
        return OK;
    case 33: /* PCI bus */
        *value = 1 + fake_physical(device);
        return OK;
    case 75: /* compute capability 9.0 */
        *value = 9;
        return OK;
    default:
        *value = 0;
        return OK;
    }
}

static const struct {
    int number;
    const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static Result error_text(int error, const char **name, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].number == error) {
            *name = errors[i].name;
            *text = errors[i].text;
            return OK;
        }
    *name = *text = NULL;
    return INVALID_VALUE;
}

API cuGetErrorName(int error, const char **name) {
    const char *text;
    return error_text(error, name, &text);
}

API cuGetErrorString(int error, const char **text) {
    const char *name;
    return error_text(error, &name, text);
}

API cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version;
    (void)flags;
    *function = fake_symbol(name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FAKE_CUDA_LOG");
    if (!path) return;
    log_fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log_fd < 0) abort();
    tracing = 1;
}

__attribute__((destructor)) static void finish(void) {
    if (initialized == getpid() && !sticky) fake_report_leaks(); /* with a dead context nothing can be given back */
}
