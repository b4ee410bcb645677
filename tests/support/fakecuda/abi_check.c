/* Proof at compile time that fake.h says what a real cuda.h says:  gcc -fsyntax-only -I CUDA/include abi_check.c */
#include <cuda.h>

#include "fake.h"

#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), "size of " #theirs)
#define SAME_PLACE(ours, field, theirs, their_field)                                                                   \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, their_field), #theirs "." #their_field);                  \
    _Static_assert(sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->their_field), #theirs "." #their_field)
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)

SAME_SIZE(Location, CUmemLocation);
SAME_SIZE(AllocProp, CUmemAllocationProp);
SAME_SIZE(AccessDesc, CUmemAccessDesc);
SAME_SIZE(Ptr, CUdeviceptr);
SAME_SIZE(Handle, CUmemGenericAllocationHandle);
SAME_SIZE(Result, CUresult);
SAME_SIZE(int, CUdevice);
_Static_assert(sizeof(CUuuid) == 16, "size of CUuuid");

SAME_PLACE(Location, type, CUmemLocation, type);
SAME_PLACE(Location, id, CUmemLocation, id);
SAME_PLACE(AllocProp, type, CUmemAllocationProp, type);
SAME_PLACE(AllocProp, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(AllocProp, location, CUmemAllocationProp, location);
SAME_PLACE(AllocProp, win32, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(AllocProp, flags.compression, CUmemAllocationProp, allocFlags.compressionType);
SAME_PLACE(AllocProp, flags.rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_PLACE(AllocProp, flags.usage, CUmemAllocationProp, allocFlags.usage);
SAME_PLACE(AccessDesc, location, CUmemAccessDesc, location);
SAME_PLACE(AccessDesc, flags, CUmemAccessDesc, flags);

SAME(OK, CUDA_SUCCESS);
SAME(INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME(OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
SAME(INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(UNKNOWN, CUDA_ERROR_UNKNOWN);

SAME(PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(ON_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(PROT_R, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(PROT_RW, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

SAME(16, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(33, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
SAME(75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(102, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(103, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(110, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
