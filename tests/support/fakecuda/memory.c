/* Physical memory, handles, and the address space.
 *
 * "Physical" memory is a sparse file in the state folder. Whoever holds a handle, a mapping or an exported descriptor
 * holds the same open file description, which carries a shared flock; so whether memory is still referenced by any
 * process, even after a SIGKILL, is one non-blocking flock. */
#define _GNU_SOURCE
#include "fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_OBJECTS = 1 << 16 };

typedef struct {
    Handle id;
    int fd, physical, exportable;
    size_t size;
} Memory;
typedef struct {
    Ptr address;
    size_t size;
} Range;
typedef struct {
    Ptr address;
    size_t size;
    int physical, rights;
} Mapping;

static Memory memories[MAX_OBJECTS];
static Range ranges[MAX_OBJECTS];
static Mapping mappings[MAX_OBJECTS];
static int n_memories, n_ranges, n_mappings;
static Handle next_handle = 0xFA4E00000001ull;

/* --- physical memory --- */

/* Holds other processes off while memory is counted and created; closing it lets them on. */
static int state_lock(void) {
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/lock", fake_state);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) flock(fd, LOCK_EX);
    return fd;
}

/* Bytes of a GPU in use by any process; frees what is in no use any more. To be called with the state's lock. */
static size_t sweep(int physical) {
    size_t sum = 0;
    DIR *folder = opendir(fake_state);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[PATH_MAX + 300];
        struct stat file;
        int owner;
        if (sscanf(entry->d_name, "mem-%d-", &owner) != 1) continue;
        snprintf(path, sizeof path, "%s/%s", fake_state, entry->d_name);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0) continue;
        if (!flock(fd, LOCK_EX | LOCK_NB))
            unlink(path);
        else if (owner == physical && !fstat(fd, &file))
            sum += file.st_size;
        close(fd);
    }
    if (folder) closedir(folder);
    return sum;
}

size_t fake_used(int physical) {
    int lock = state_lock();
    size_t sum = sweep(physical);
    close(lock);
    return sum;
}

static Memory *find(Handle handle) {
    for (int i = 0; i < n_memories; i++)
        if (memories[i].id == handle) return &memories[i];
    return NULL;
}

static Handle add(int fd, int physical, size_t size, int exportable) {
    memories[n_memories++] = (Memory){next_handle, fd, physical, exportable, size};
    return next_handle++;
}

static Result check(const AllocProp *prop) {
    NEED(prop && prop->type == PINNED, "the type of an allocation must be PINNED");
    NEED(prop->location.type == ON_DEVICE, "the location of an allocation must be a device");
    NEED(!(prop->handle_types & ~POSIX_FD), "only POSIX file descriptors are handles here");
    NEED(!prop->flags.compression, "compressible memory is not for sharing");
    if (fake_physical(prop->location.id) < 0) return INVALID_DEVICE;
    return OK;
}

API cuMemGetAllocationGranularity(size_t *granularity, const AllocProp *prop, int option) {
    ENTER(1);
    Result result = check(prop);
    if (result) return result;
    NEED(granularity && (option == 0 || option == 1), "granularity option %d", option);
    *granularity = GRANULARITY;
    return OK;
}

API cuMemCreate(Handle *handle, size_t size, const AllocProp *prop, unsigned long long flags) {
    ENTER(1);
    Result result = check(prop);
    if (result) return result;
    NEED(handle && size && size % GRANULARITY == 0 && !flags, "cuMemCreate: %zu is not a multiple of 2 MiB", size);
    static unsigned serial;
    char path[PATH_MAX + 64];
    int physical = fake_physical(prop->location.id), lock = state_lock();
    if (lock < 0) return UNKNOWN;
    if (n_memories == MAX_OBJECTS || sweep(physical) + size > fake_capacity()) {
        close(lock);
        return OUT_OF_MEMORY;
    }
    int fd;
    do { /* in containers every process may be number 1 */
        snprintf(path, sizeof path, "%s/mem-%d-%d-%u", fake_state, physical, (int)getpid(), ++serial);
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    } while (fd < 0 && errno == EEXIST);
    int failed = fd < 0 || flock(fd, LOCK_SH) || ftruncate(fd, size);
    close(lock);
    if (failed) {
        if (fd >= 0) close(fd);
        return UNKNOWN;
    }
    if (fake_on("FAKE_CUDA_POISON")) {
        void *content = mmap(NULL, size, PROT_WRITE, MAP_SHARED, fd, 0);
        if (content == MAP_FAILED) {
            close(fd);
            return UNKNOWN;
        }
        memset(content, 0xA5, size);
        munmap(content, size);
    }
    if (prop->flags.rdma) fake_say("memory for GPUDirect RDMA");
    *handle = add(fd, physical, size, prop->handle_types & POSIX_FD);
    return OK;
}

API cuMemRelease(Handle handle) {
    ENTER(1);
    Memory *memory = find(handle);
    NEED(memory, "cuMemRelease of an unknown or released handle %llx", (unsigned long long)handle);
    close(memory->fd); /* mappings and exported descriptors keep the file's description */
    *memory = memories[--n_memories];
    return OK;
}

API cuMemExportToShareableHandle(void *out, Handle handle, int type, unsigned long long flags) {
    ENTER(1);
    Memory *memory = find(handle);
    NEED(memory, "export of an unknown or released handle %llx", (unsigned long long)handle);
    NEED(out && type == POSIX_FD && !flags, "export: as a POSIX file descriptor, with flags 0");
    NEED(memory->exportable, "export of memory that was created without requestedHandleTypes");
    int fd = fcntl(memory->fd, F_DUPFD, 0); /* not CLOEXEC: nobody promises that */
    if (fd < 0) return UNKNOWN;
    *(int *)out = fd;
    return OK;
}

/* Whatever a peer may have sent is refused with an error, in strict mode too: that is no mistake of this process. */
API cuMemImportFromShareableHandle(Handle *handle, void *descriptor, int type) {
    ENTER(1);
    NEED(handle && type == POSIX_FD, "import: from a POSIX file descriptor");
    char link[64], path[PATH_MAX], here[2 * PATH_MAX];
    int physical = 0;
    struct stat file, known;
    snprintf(link, sizeof link, "/proc/self/fd/%d", (int)(intptr_t)descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    const char *name = strrchr(path, '/'); /* the rest of the path depends on the mount namespace that it was opened in */
    snprintf(here, sizeof here, "%s%s", fake_state, name ? name : "");
    if (!name || sscanf(name, "/mem-%d-", &physical) != 1 || fstat((int)(intptr_t)descriptor, &file) ||
        stat(here, &known) || file.st_ino != known.st_ino || file.st_dev != known.st_dev) {
        fake_say("import of descriptor %d, which is no CUDA memory", (int)(intptr_t)descriptor);
        return INVALID_VALUE;
    }
    if (n_memories == MAX_OBJECTS) return OUT_OF_MEMORY;
    int fd = fcntl((int)(intptr_t)descriptor, F_DUPFD_CLOEXEC, 0); /* the caller still owns, and must close, its own */
    if (fd < 0 || fstat(fd, &file)) {
        if (fd >= 0) close(fd);
        return UNKNOWN;
    }
    *handle = add(fd, physical, file.st_size, POSIX_FD);
    return OK;
}

/* --- address space --- */

static int overlaps(Ptr address, size_t size) {
    for (int i = 0; i < n_mappings; i++)
        if (mappings[i].address < address + size && address < mappings[i].address + mappings[i].size) return 1;
    return 0;
}

static int inside(const Mapping *mapping, Ptr address, size_t size) {
    return mapping->address >= address && mapping->address + mapping->size <= address + size;
}

/* Whether [address, address + size) is made of whole mappings. */
static int whole(Ptr address, size_t size) {
    size_t sum = 0;
    for (int i = 0; i < n_mappings; i++)
        if (inside(&mappings[i], address, size)) sum += mappings[i].size;
    return size && sum == size;
}

static int nothing_at(Ptr address, size_t size, int flags) {
    void *at = mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    return at == MAP_FAILED ? -1 : madvise(at, size, MADV_DONTFORK);
}

API cuMemAddressReserve(Ptr *out, size_t size, size_t alignment, Ptr hint, unsigned long long flags) {
    ENTER(1);
    NEED(out && size && size % GRANULARITY == 0 && !flags, "reserving %zu bytes", size);
    NEED(!(alignment & (alignment - 1)) && hint % GRANULARITY == 0, "alignment or hint of a reservation");
    if (alignment < GRANULARITY) alignment = GRANULARITY;
    if (n_ranges == MAX_OBJECTS) return OUT_OF_MEMORY;
    Ptr address = hint;
    if (!hint || fake_on("FAKE_CUDA_IGNORE_HINT") || nothing_at(hint, size, MAP_FIXED_NOREPLACE)) {
        int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        char *start = mmap(NULL, size + alignment, PROT_NONE, kind, -1, 0);
        if (start == MAP_FAILED) return OUT_OF_MEMORY;
        char *aligned = (char *)(((uintptr_t)start + alignment - 1) & ~(alignment - 1));
        if (aligned > start) munmap(start, aligned - start);
        if (start + alignment > aligned) munmap(aligned + size, start + alignment - aligned);
        madvise(aligned, size, MADV_DONTFORK);
        address = (Ptr)aligned;
    }
    ranges[n_ranges++] = (Range){address, size};
    *out = address;
    return OK;
}

API cuMemAddressFree(Ptr address, size_t size) {
    ENTER(1);
    NEED(!overlaps(address, size), "address free of a mapped range");
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].address == address && ranges[i].size == size) {
            munmap((void *)address, size);
            ranges[i] = ranges[--n_ranges];
            return OK;
        }
    return fake_misuse(INVALID_VALUE, "address free of %llx+%zx, no whole reservation", (unsigned long long)address, size);
}

API cuMemMap(Ptr address, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    ENTER(1);
    Memory *memory = find(handle);
    NEED(memory, "cuMemMap of an unknown or released handle %llx", (unsigned long long)handle);
    NEED(!offset && !flags, "cuMemMap: offset and flags must be zero");
    NEED(size == memory->size, "cuMemMap: %zu bytes is not the handle's %zu", size, memory->size);
    NEED(address % GRANULARITY == 0, "cuMemMap: the address is no multiple of 2 MiB");
    int reserved = 0;
    for (int i = 0; i < n_ranges; i++)
        reserved |= ranges[i].address <= address && address + size <= ranges[i].address + ranges[i].size;
    NEED(reserved, "cuMemMap outside any reservation");
    NEED(!overlaps(address, size), "cuMemMap over a mapping");
    if (n_mappings == MAX_OBJECTS) return OUT_OF_MEMORY;
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0);
    if (at == MAP_FAILED || madvise(at, size, MADV_DONTFORK)) return OUT_OF_MEMORY;
    mappings[n_mappings++] = (Mapping){address, size, memory->physical, 0};
    return OK;
}

API cuMemUnmap(Ptr address, size_t size) {
    ENTER(1);
    NEED(whole(address, size), "cuMemUnmap of %llx+%zx: not whole mappings", (unsigned long long)address, size);
    if (nothing_at(address, size, MAP_FIXED)) return UNKNOWN;
    for (int i = n_mappings - 1; i >= 0; i--)
        if (inside(&mappings[i], address, size)) mappings[i] = mappings[--n_mappings];
    return OK;
}

API cuMemSetAccess(Ptr address, size_t size, const AccessDesc *access, size_t count) {
    ENTER(1);
    NEED(whole(address, size), "cuMemSetAccess of %llx+%zx: not whole mappings", (unsigned long long)address, size);
    NEED(access && count == 1 && access->location.type == ON_DEVICE, "cuMemSetAccess: for one device here");
    NEED(access->flags == 0 || access->flags == PROT_R || access->flags == PROT_RW, "cuMemSetAccess: flags");
    int physical = fake_physical(access->location.id);
    if (physical < 0) return INVALID_DEVICE;
    for (int i = 0; i < n_mappings; i++)
        if (inside(&mappings[i], address, size))
            NEED(mappings[i].physical == physical, "cuMemSetAccess for a GPU that the memory is not on");
    int protection = (access->flags & PROT_R ? PROT_READ : 0) | (access->flags & PROT_W ? PROT_WRITE : 0);
    if (mprotect((void *)address, size, protection)) return UNKNOWN;
    for (int i = 0; i < n_mappings; i++)
        if (inside(&mappings[i], address, size)) mappings[i].rights = access->flags;
    return OK;
}

API cuMemGetAccess(unsigned long long *flags, const Location *location, Ptr address) {
    ENTER(1);
    NEED(flags && location && location->type == ON_DEVICE, "cuMemGetAccess: arguments");
    for (int i = 0; i < n_mappings; i++)
        if (mappings[i].address <= address && address < mappings[i].address + mappings[i].size) {
            *flags = mappings[i].rights;
            return OK;
        }
    return fake_misuse(INVALID_VALUE, "cuMemGetAccess of an address that is not mapped");
}

int fake_accessible(Ptr address, size_t size, int rights) {
    while (size) {
        size_t step = 0;
        for (int i = 0; i < n_mappings; i++)
            if (mappings[i].address <= address && address < mappings[i].address + mappings[i].size &&
                (mappings[i].rights & rights) == rights)
                step = mappings[i].address + mappings[i].size - address;
        if (!step) return 0;
        if (step > size) step = size;
        address += step;
        size -= step;
    }
    return 1;
}

void fake_report_leaks(void) {
    if (n_memories || n_mappings || n_ranges)
        fake_say("LEAK handles=%d mappings=%d reservations=%d", n_memories, n_mappings, n_ranges);
}
