/* What cuGetProcAddress finds. The bindings ask for a base name ("cuMemcpyHtoD") and a version; the driver chooses the
 * _v2 by itself. What is missing here fails when it is called, not before. */
#include "fake.h"

#include <string.h>

#define FUNCTIONS(PLAIN, V2)                                                                                           \
    PLAIN(cuInit) PLAIN(cuDriverGetVersion) PLAIN(cuDeviceGetCount) PLAIN(cuDeviceGet) PLAIN(cuDeviceGetName)          \
    V2(cuDeviceGetUuid) V2(cuDeviceTotalMem) PLAIN(cuDeviceGetAttribute) PLAIN(cuGetErrorName)                         \
    PLAIN(cuGetErrorString) V2(cuGetProcAddress) PLAIN(cuMemGetAllocationGranularity) PLAIN(cuMemCreate)               \
    PLAIN(cuMemRelease) PLAIN(cuMemExportToShareableHandle) PLAIN(cuMemImportFromShareableHandle)                      \
    PLAIN(cuMemAddressReserve) PLAIN(cuMemAddressFree) PLAIN(cuMemMap) PLAIN(cuMemUnmap) PLAIN(cuMemSetAccess)         \
    PLAIN(cuMemGetAccess) V2(cuMemcpyHtoD) V2(cuMemcpyDtoH) V2(cuMemcpyDtoD) V2(cuMemsetD8)                            \
    PLAIN(cuDevicePrimaryCtxRetain) V2(cuDevicePrimaryCtxRelease) PLAIN(cuCtxSetCurrent) V2(cuCtxPushCurrent)          \
    V2(cuCtxPopCurrent) PLAIN(cuCtxGetCurrent) PLAIN(cuCtxGetDevice) PLAIN(cuCtxSynchronize) V2(cuMemGetInfo)

/* Only their addresses are wanted here. */
#define DECLARE_PLAIN(name) extern void name(void);
#define DECLARE_V2(name) extern void name##_v2(void);
FUNCTIONS(DECLARE_PLAIN, DECLARE_V2)

#define ENTRY_PLAIN(name) {#name, name},
#define ENTRY_V2(name) {#name, name##_v2},
static const struct {
    const char *name;
    void (*function)(void);
} table[] = {FUNCTIONS(ENTRY_PLAIN, ENTRY_V2)};

void *fake_symbol(const char *name) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name)) return (void *)table[i].function;
    return NULL;
}
