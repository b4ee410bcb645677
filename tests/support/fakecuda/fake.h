/* What the parts of the fake driver share. README.md says what it is and which settings it has. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* --- The part of the driver's binary interface that is spoken; abi_check.c holds it against cuda.h. --- */

typedef int Result;
typedef uint64_t Ptr, Handle;
typedef struct {
    int type, id;
} Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} AllocProp;
typedef struct {
    Location location;
    int flags;
} AccessDesc;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};
enum { PINNED = 1, ON_DEVICE = 1, POSIX_FD = 1, PROT_R = 1, PROT_W = 2, PROT_RW = 3 };
enum { GRANULARITY = 2 << 20, MAX_DEVICES = 16 };

/* --- How each call begins and ends. --- */

#define API __attribute__((visibility("default"))) Result

/* Takes the driver's lock, which is dropped when the calling function returns; returns early with an error that is
 * injected, that the process's state makes, or that an earlier fault has left. */
#define ENTER(needs_init)                                                                                              \
    __attribute__((cleanup(fake_leave), unused)) int entered_ = 0;                                                     \
    do {                                                                                                               \
        Result early_ = fake_enter(__func__, needs_init);                                                              \
        if (early_) return early_;                                                                                     \
    } while (0)

Result fake_enter(const char *function, int needs_init);
void fake_leave(int *entered);

/* A line to the log. */
__attribute__((format(printf, 1, 2))) void fake_say(const char *format, ...);

/* The same for what no program may do: ends the process in strict mode, otherwise returns `error`. */
__attribute__((format(printf, 2, 3))) Result fake_misuse(int error, const char *format, ...);

#define NEED(condition, ...)                                                                                           \
    do {                                                                                                               \
        if (!(condition)) return fake_misuse(INVALID_VALUE, __VA_ARGS__);                                              \
    } while (0)

/* --- process.c --- */

int fake_on(const char *setting);
int fake_devices(void);
size_t fake_capacity(void);
/* The GPU that a process calls `ordinal`, or -1. */
int fake_physical(int ordinal);
/* Every call that needs the driver returns this error from now on. */
Result fake_fault(int error);
extern const char *fake_state;

/* --- memory.c --- */

size_t fake_used(int physical);
/* OK if [address, address + size) is mapped with at least these rights. */
int fake_accessible(Ptr address, size_t size, int rights);
/* Says what was not given back. */
void fake_report_leaks(void);

/* --- proc_address.c --- */

void *fake_symbol(const char *name);
