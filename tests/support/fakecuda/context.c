/* Contexts and copies: what engines do, and the memory service never. A forbidden access kills the context, and with
 * it every later call of the process, as on a GPU. */
#define _GNU_SOURCE
#include "fake.h"

#include <string.h>

enum { MAX_STACK = 16 };

static char contexts[MAX_DEVICES]; /* the address of one is the context of that ordinal */
static int references[MAX_DEVICES];
static __thread void *stack[MAX_STACK];
static __thread int depth;

static void *current(void) {
    return depth ? stack[depth - 1] : NULL;
}

static Result may_have_context(int device) {
    NEED(!fake_on("FAKE_CUDA_NO_CONTEXT"), "this process must not make a context");
    return fake_physical(device) < 0 ? INVALID_DEVICE : OK;
}

static int usable(void *context) {
    return (char *)context >= contexts && (char *)context < contexts + MAX_DEVICES &&
           references[(char *)context - contexts] > 0;
}

API cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER(1);
    Result result = may_have_context(device);
    if (result) return result;
    references[device]++;
    *context = &contexts[device];
    return OK;
}

API cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(1);
    NEED(device >= 0 && device < MAX_DEVICES && references[device] > 0, "a primary context released too often");
    references[device]--;
    return OK;
}

API cuCtxSetCurrent(void *context) {
    ENTER(1);
    NEED(!context || usable(context), "cuCtxSetCurrent: no such context");
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

API cuCtxPushCurrent_v2(void *context) {
    ENTER(1);
    NEED(usable(context) && depth < MAX_STACK, "cuCtxPushCurrent: no such context, or too many");
    stack[depth++] = context;
    return OK;
}

API cuCtxPopCurrent_v2(void **context) {
    ENTER(1);
    if (!depth) return INVALID_CONTEXT;
    void *top = stack[--depth];
    if (context) *context = top;
    return OK;
}

API cuCtxGetCurrent(void **context) {
    ENTER(1);
    *context = current();
    return OK;
}

API cuCtxGetDevice(int *device) {
    ENTER(1);
    if (!current()) return INVALID_CONTEXT;
    *device = (int)((char *)current() - contexts);
    return OK;
}

API cuCtxSynchronize(void) {
    ENTER(1);
    return current() ? OK : INVALID_CONTEXT;
}

API cuMemGetInfo_v2(size_t *left, size_t *total) {
    ENTER(1);
    if (!current()) return INVALID_CONTEXT;
    *total = fake_capacity();
    *left = *total - fake_used(fake_physical((int)((char *)current() - contexts)));
    return OK;
}

static Result touch(Ptr address, size_t size, int rights) {
    if (!current()) return INVALID_CONTEXT;
    if (fake_accessible(address, size, rights)) return OK;
    fake_say("FAULT %s of %llx", rights & PROT_W ? "write" : "read", (unsigned long long)address);
    return fake_fault(ILLEGAL_ADDRESS);
}

API cuMemcpyHtoD_v2(Ptr to, const void *from, size_t size) {
    ENTER(1);
    Result result = touch(to, size, PROT_RW);
    if (!result) memcpy((void *)to, from, size);
    return result;
}

API cuMemcpyDtoH_v2(void *to, Ptr from, size_t size) {
    ENTER(1);
    Result result = touch(from, size, PROT_R);
    if (!result) memcpy(to, (void *)from, size);
    return result;
}

API cuMemcpyDtoD_v2(Ptr to, Ptr from, size_t size) {
    ENTER(1);
    Result result = touch(from, size, PROT_R);
    if (!result) result = touch(to, size, PROT_RW);
    if (!result) memmove((void *)to, (void *)from, size);
    return result;
}

API cuMemsetD8_v2(Ptr to, unsigned char value, size_t size) {
    ENTER(1);
    Result result = touch(to, size, PROT_RW);
    if (!result) memset((void *)to, value, size);
    return result;
}
