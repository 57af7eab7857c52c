// A libcuda that launches nothing: it notes down what it is asked for.  Each entry is a header and the bytes that follow.
#include "cuda.h"
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// PyTorch's memory of the CPU, aligned as that of a GPU: this library is loaded before all others.
int posix_memalign(void **made, size_t alignment, size_t size) {
  *made = memalign(alignment < 512 ? 512 : alignment, size);
  return *made ? 0 : 12;
}

enum { LAUNCH, MAP, ZERO, COPY };

typedef struct {
  uint64_t kind, function, stream, grid[3], block[3], shared, attributes, bytes;
} Entry;

static unsigned char log_[1 << 24];
static size_t used;
static struct { uint64_t function; int count; int sizes[256]; } kernels[512];
static int known, failing = -1, logging = 1;
static CUcontext context;
static int retained;
static void (*runner)(const Entry *, const unsigned char *); // does what is asked for: an emulator of a test's

static void put(const void *data, size_t size) {
  if (used + size <= sizeof(log_)) memcpy(log_ + used, data, size);
  used += size;
}
static void run(const Entry *e, const unsigned char *data) {
  if (!runner) return;
  if (e->kind == LAUNCH) runner(e, data);
  if (e->kind == ZERO) memset((void *)e->function, (int)e->grid[1], e->grid[0]);
  if (e->kind == COPY) memcpy((void *)e->function, (void *)e->grid[1], e->grid[0]);
  used = 0;
}
static void run_now(const Entry *e) { run(e, log_ + used - e->bytes); }

// What a test calls.
void fake_kernel(uint64_t function, int count, const int *sizes) {
  kernels[known].function = function;
  kernels[known].count = count;
  memcpy(kernels[known++].sizes, sizes, sizeof(int) * count);
}
size_t fake_take(unsigned char *into, size_t size) {
  size_t there = used;
  if (there <= size) memcpy(into, log_, there);
  used = 0;
  return there;
}
void fake_runner(void *f) { runner = f; }
void fake_fail(int after) { failing = after; }
void fake_logging(int on) { logging = on; }
void fake_no_context(void) { context = NULL; }
void fake_context(uint64_t other) { context = (CUcontext)other; }
int fake_retained(void) { return retained; }

static CUresult result(void) { return failing >= 0 && failing-- == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  if (!logging) return CUDA_SUCCESS;
  Entry e = {LAUNCH, (uint64_t)f, (uint64_t)c->hStream, {c->gridDimX, c->gridDimY, c->gridDimZ},
             {c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, c->numAttrs, 0};
  for (int i = 0; i < known; ++i) {
    if (kernels[i].function != (uint64_t)f) continue;
    e.bytes = c->numAttrs * sizeof(CUlaunchAttribute);
    for (int j = 0; j < kernels[i].count; ++j) e.bytes += kernels[i].sizes[j];
    put(&e, sizeof(e));
    put(c->attrs, c->numAttrs * sizeof(CUlaunchAttribute));
    for (int j = 0; j < kernels[i].count; ++j) put(params[j], kernels[i].sizes[j]);
    run_now(&e);
    return result();
  }
  put(&e, sizeof(e));
  return result();
}

// The first bytes of such a map are what it was made of; it must lie as the driver wants it.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (!logging) return CUDA_SUCCESS;
  if ((uintptr_t)map % 64 || (uintptr_t)address % 16) return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof(*map));
  uint64_t *at = (uint64_t *)map;
  *at++ = (uint64_t)address;
  *at++ = type | rank << 8 | interleave << 16 | swizzle << 24 | (uint64_t)promotion << 32 | (uint64_t)fill << 40;
  for (cuuint32_t i = 0; i < rank; ++i) *at++ = dims[i];
  for (cuuint32_t i = 0; i + 1 < rank; ++i) *at++ = strides[i];
  for (cuuint32_t i = 0; i < rank; ++i) *at++ = box[i] | (uint64_t)steps[i] << 32;
  return result();
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
  if (!logging) return CUDA_SUCCESS;
  Entry e = {ZERO, to, (uint64_t)stream, {size, value, 0}, {0}, 0, 0, 0};
  put(&e, sizeof(e));
  if (!runner) memset((void *)to, value, size); // as PyTorch's own zeros are, where no kernel does anything
  run_now(&e);
  return result();
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  if (!logging) return CUDA_SUCCESS;
  Entry e = {COPY, to, (uint64_t)stream, {size, from, 0}, {0}, 0, 0, 0};
  put(&e, sizeof(e));
  run_now(&e);
  return result();
}
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
  for (int j = 0; j < known; ++j) {
    if (kernels[j].function != (uint64_t)f || i >= (size_t)kernels[j].count) continue;
    return *size = kernels[j].sizes[i], *offset = 0, CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDriverGetVersion(int *v) { return *v = 12080, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "a made-up error"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult e, const char **s) { *s = "CUDA_ERROR_INVALID_VALUE"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = context; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { context = c; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { ++retained; *c = (CUcontext)(uintptr_t)(d + 1); return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *to, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)to = p; return CUDA_SUCCESS; }
// Of what driver.c has beside launches, and no test calls.
#define NEVER(name) CUresult never_##name(void) __asm__(#name); CUresult never_##name(void) { return 801; }
NEVER(cuDeviceGetAttribute) NEVER(cuModuleLoadData) NEVER(cuModuleGetFunction) NEVER(cuFuncGetAttribute)
NEVER(cuModuleUnload) NEVER(cuCtxGetDevice) NEVER(cuStreamIsCapturing)
NEVER(cuFuncSetCacheConfig) NEVER(cuCtxGetLimit) NEVER(cuCtxSetLimit) NEVER(cuOccupancyMaxActiveClusters)
