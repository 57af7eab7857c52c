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

// What is captured of a stream, and a graph of it.
static struct { CUstream stream; unsigned char data[1 << 20]; size_t size; } captured;
static CUstream busy; // that somebody else is capturing
static int made_graphs, launched_graphs, living_graphs, refusing;

static void put(const void *data, size_t size) {
  if (used + size <= sizeof(log_)) memcpy(log_ + used, data, size);
  used += size;
}
static void note(CUstream stream, const void *data, size_t size) {
  if (!captured.stream || stream != captured.stream) return put(data, size);
  memcpy(captured.data + captured.size, data, size);
  captured.size += size;
}
static void run(const Entry *e, const unsigned char *data) {
  if (!runner) return;
  if (e->kind == LAUNCH) runner(e, data);
  if (e->kind == ZERO) memset((void *)e->function, (int)e->grid[1], e->grid[0]);
  if (e->kind == COPY) memcpy((void *)e->function, (void *)e->grid[1], e->grid[0]);
  used = 0;
}
static void run_now(CUstream stream, const Entry *e) {
  if (!captured.stream || stream != captured.stream) run(e, log_ + used - e->bytes);
}

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
void fake_busy(uint64_t stream) { busy = (CUstream)stream; }
void fake_refuse_graphs(int on) { refusing = on; }
void fake_graphs(int *into) { into[0] = made_graphs, into[1] = launched_graphs, into[2] = living_graphs; }

static CUresult result(void) { return failing >= 0 && failing-- == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  if (!logging) return CUDA_SUCCESS;
  Entry e = {LAUNCH, (uint64_t)f, (uint64_t)c->hStream, {c->gridDimX, c->gridDimY, c->gridDimZ},
             {c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes, c->numAttrs, 0};
  for (int i = 0; i < known; ++i) {
    if (kernels[i].function != (uint64_t)f) continue;
    e.bytes = c->numAttrs * sizeof(CUlaunchAttribute);
    for (int j = 0; j < kernels[i].count; ++j) e.bytes += kernels[i].sizes[j];
    note(c->hStream, &e, sizeof(e));
    note(c->hStream, c->attrs, c->numAttrs * sizeof(CUlaunchAttribute));
    for (int j = 0; j < kernels[i].count; ++j) note(c->hStream, params[j], kernels[i].sizes[j]);
    run_now(c->hStream, &e);
    return result();
  }
  note(c->hStream, &e, sizeof(e));
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
  note(stream, &e, sizeof(e));
  run_now(stream, &e);
  return result();
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  if (!logging) return CUDA_SUCCESS;
  Entry e = {COPY, to, (uint64_t)stream, {size, from, 0}, {0}, 0, 0, 0};
  note(stream, &e, sizeof(e));
  run_now(stream, &e);
  return result();
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  static CUstreamCaptureMode now = CU_STREAM_CAPTURE_MODE_GLOBAL;
  CUstreamCaptureMode before = now;
  return now = *mode, *mode = before, CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream *s, unsigned int flags) { *s = malloc(1); return CUDA_SUCCESS; }
CUresult cuStreamDestroy(CUstream s) { free(s); return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) {
  *status = busy && s == busy ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream s, CUstreamCaptureMode mode) {
  if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  captured.stream = s, captured.size = 0;
  return CUDA_SUCCESS;
}
typedef struct { size_t size; unsigned char data[]; } Made;
static Made *copy_of(const void *data, size_t size) {
  Made *made = malloc(sizeof(Made) + size);
  memcpy(made->data, data, made->size = size);
  return made;
}
CUresult cuStreamEndCapture(CUstream s, CUgraph *graph) {
  *graph = (CUgraph)copy_of(captured.data, captured.size);
  captured.stream = NULL;
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *into, CUgraph graph, unsigned long long flags) {
  if (refusing) return CUDA_ERROR_INVALID_VALUE;
  ++made_graphs, ++living_graphs;
  *into = (CUgraphExec)copy_of(((Made *)graph)->data, ((Made *)graph)->size);
  return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) { free(graph); return CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec graph) { --living_graphs; free(graph); return CUDA_SUCCESS; }
CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  Made *made = (Made *)graph;
  CUresult failed = result();
  if (failed != CUDA_SUCCESS) return failed;
  ++launched_graphs;
  for (size_t at = 0; at < made->size;) {
    Entry e;
    memcpy(&e, made->data + at, sizeof(e));
    e.stream = (uint64_t)stream;
    put(&e, sizeof(e));
    put(made->data + at + sizeof(e), e.bytes);
    run(&e, made->data + at + sizeof(e));
    at += sizeof(e) + e.bytes;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
  for (int j = 0; j < known; ++j) {
    if (kernels[j].function != (uint64_t)f || i >= (size_t)kernels[j].count) continue;
    return *size = kernels[j].sizes[i], *offset = 0, CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
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
NEVER(cuFuncSetCacheConfig) NEVER(cuCtxGetLimit) NEVER(cuCtxSetLimit) NEVER(cuOccupancyMaxActiveClusters)
