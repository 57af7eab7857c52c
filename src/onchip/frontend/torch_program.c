/* Programs: launches of kernels, fills and copies, with all that a tape knows of them beforehand; see torch_program.py.

   A program has a cell of 8 bytes for each parameter of each launch, and is run with values for its slots, addresses
   mostly, which go into the cells that depend on them.  Attributes, their order, and tensor maps are those of Triton
   3.6's launcher (backends/nvidia/driver.py and driver.c), whose headers this is compiled with.  The machine is
   little-endian: a parameter of 4 bytes is the first half of its cell. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

/* The driver, which is there where a program is run but not where this is built. */
static struct {
  CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
  CUresult (*encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                     const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  CUresult (*fill)(CUdeviceptr, unsigned char, size_t, CUstream);
  CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
  CUresult (*error_name)(CUresult, const char **);
  CUresult (*context)(CUcontext *);
  CUresult (*set_context)(CUcontext);
  CUresult (*device)(CUdevice *, int);
  CUresult (*retain)(CUcontext *, CUdevice);
  CUresult (*param)(CUfunction, size_t, size_t *, size_t *);
} driver;

static PyObject *load(PyObject *module, PyObject *path) {
  static const char *const names[] = {
      "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuMemsetD8Async", "cuMemcpyDtoDAsync_v2", "cuGetErrorName",
      "cuCtxGetCurrent",  "cuCtxSetCurrent",        "cuDeviceGet",     "cuDevicePrimaryCtxRetain",
      "cuFuncGetParamInfo" /* since CUDA 12.4; the others are older */};
  enum { COUNT = sizeof(names) / sizeof(*names) };
  const char *name = PyUnicode_AsUTF8(path);
  if (!name) return NULL;
  void *library = dlopen(name, RTLD_LAZY);
  if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  void *found[COUNT];
  for (int i = 0; i < COUNT; ++i) {
    found[i] = dlsym(library, names[i]);
    if (!found[i]) return PyErr_Format(PyExc_OSError, "%s has no %s", name, names[i]);
  }
  memcpy(&driver, found, sizeof(found));
  Py_RETURN_NONE;
}

/* takes(function, sizes): whether these are the bytes of the kernel's parameters */
static PyObject *takes(PyObject *module, PyObject *args) {
  unsigned long long function;
  PyObject *sizes;
  size_t offset, size;
  if (!PyArg_ParseTuple(args, "KO!", &function, &PyTuple_Type, &sizes)) return NULL;
  if (!driver.param) return PyErr_Format(PyExc_RuntimeError, "no driver is loaded");
  Py_ssize_t count = PyTuple_GET_SIZE(sizes);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (driver.param((CUfunction)(uintptr_t)function, i, &offset, &size) != CUDA_SUCCESS) Py_RETURN_FALSE;
    if (size != PyLong_AsSize_t(PyTuple_GET_ITEM(sizes, i))) {
      if (PyErr_Occurred()) return NULL;
      Py_RETURN_FALSE;
    }
  }
  return PyBool_FromLong(driver.param((CUfunction)(uintptr_t)function, count, &offset, &size) != CUDA_SUCCESS);
}

enum { LAUNCH, FILL, COPY };
enum { RANKS = 5 };
typedef struct {
  int slot; /* -1: none, the offset is all of it */
  int64_t offset;
} Place;

typedef struct {
  int kind;
  CUfunction function;
  CUlaunchConfig config;
  CUlaunchAttribute attributes[4];
  void **params;
  Place to, from;
  size_t bytes;
} Step;

typedef struct {
  Place place;
  uint64_t *cell;
  int narrow; /* of 32 bits */
} Patch;

typedef struct {
  Place address, dims[RANKS];
  cuuint64_t strides[RANKS];
  cuuint32_t box[RANKS];
  cuuint32_t rank;
  int type, swizzle, fill;
} Map;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  pthread_mutex_t lock; /* for the cells, which threads without the GIL would share */
  int device;
  Py_ssize_t slots, steps, maps, patches;
  Step *step;
  Map *map;
  Patch *patch;
  CUtensorMap *encoded; /* aligned */
  uint64_t *cells;
  void **params;
} Program;

typedef struct {
  CUresult code;
  const char *what;
  Py_ssize_t at;
} Failure;

static uint64_t value(Place p, const uint64_t *given) { return (p.slot < 0 ? 0 : given[p.slot]) + (uint64_t)p.offset; }

#define TRY(made, does, number)                               \
  do {                                                        \
    CUresult code_ = (made);                                  \
    if (code_ != CUDA_SUCCESS) return (Failure){code_, does, number}; \
  } while (0)

static Failure run_steps(Program *p, CUstream stream, const uint64_t *given) {
  for (Py_ssize_t i = 0; i < p->patches; ++i) {
    uint64_t made = value(p->patch[i].place, given);
    if (p->patch[i].narrow && (int64_t)made != (int32_t)made) return (Failure){CUDA_ERROR_INVALID_VALUE, "a number", -1};
    *p->patch[i].cell = made;
  }
  for (Py_ssize_t i = 0; i < p->maps; ++i) {
    Map *m = &p->map[i];
    cuuint64_t dims[RANKS];
    const cuuint32_t steps[RANKS] = {1, 1, 1, 1, 1};
    for (cuuint32_t j = 0; j < m->rank; ++j) dims[j] = value(m->dims[j], given);
    TRY(driver.encode(&p->encoded[i], m->type, m->rank, (void *)value(m->address, given), dims, m->strides, m->box,
                      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, m->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, m->fill),
        "cuTensorMapEncodeTiled", i);
  }
  for (Py_ssize_t i = 0; i < p->steps; ++i) {
    Step *s = &p->step[i];
    if (s->kind == LAUNCH) {
      s->config.hStream = stream;
      TRY(driver.launch(&s->config, s->function, s->params, NULL), "cuLaunchKernelEx", i);
    } else if (s->kind == FILL) {
      TRY(driver.fill(value(s->to, given), 0, s->bytes, stream), "cuMemsetD8Async", i);
    } else {
      TRY(driver.copy(value(s->to, given), value(s->from, given), s->bytes, stream), "cuMemcpyDtoDAsync", i);
    }
  }
  return (Failure){CUDA_SUCCESS, NULL, 0};
}

static Failure run(Program *p, CUstream stream, const uint64_t *given) {
  CUcontext context = NULL;
  TRY(driver.context(&context), "cuCtxGetCurrent", -1);
  if (!context) { /* a thread that CUDA hasn't seen */
    CUdevice device;
    TRY(driver.device(&device, p->device), "cuDeviceGet", -1);
    TRY(driver.retain(&context, device), "cuDevicePrimaryCtxRetain", -1);
    TRY(driver.set_context(context), "cuCtxSetCurrent", -1);
  }
  return run_steps(p, stream, given);
}

/* program(stream, *values of the slots) */
static PyObject *call(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
  Program *p = (Program *)self;
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (names || count != p->slots + 1)
    return PyErr_Format(PyExc_TypeError, "a program takes a stream and %zd numbers", p->slots);
  uint64_t given[count];
  for (Py_ssize_t i = 0; i < count; ++i) given[i] = PyLong_AsUnsignedLongLongMask(args[i]);
  if (PyErr_Occurred()) return NULL;
  Failure failed;
  Py_BEGIN_ALLOW_THREADS;
  pthread_mutex_lock(&p->lock);
  failed = run(p, (CUstream)given[0], given + 1);
  pthread_mutex_unlock(&p->lock);
  Py_END_ALLOW_THREADS;
  if (failed.code == CUDA_SUCCESS) Py_RETURN_NONE;
  const char *name = NULL;
  driver.error_name(failed.code, &name);
  return PyErr_Format(PyExc_RuntimeError, "%s: %s (%zd)", name ? name : "a CUDA error", failed.what, failed.at);
}

/* ------------------------------------------------------------------------------------------------- how it is built */

static int read_place(PyObject *x, Program *p, Place *into) {
  long long offset;
  if (!PyArg_ParseTuple(x, "iL", &into->slot, &offset)) return 0;
  into->offset = offset;
  if (into->slot < -1 || into->slot >= p->slots) return PyErr_SetString(PyExc_ValueError, "no such slot"), 0;
  return 1;
}

/* (address, type, swizzle, fill, dims, strides, box), of which the last three begin with the innermost */
static int read_map(PyObject *x, Program *p, Map *m) {
  PyObject *address, *dims, *strides, *box;
  if (!PyArg_ParseTuple(x, "O!iiiO!O!O!", &PyTuple_Type, &address, &m->type, &m->swizzle, &m->fill, &PyTuple_Type,
                        &dims, &PyTuple_Type, &strides, &PyTuple_Type, &box))
    return 0;
  Py_ssize_t rank = PyTuple_GET_SIZE(dims);
  if (rank < 1 || rank > RANKS || PyTuple_GET_SIZE(box) != rank || PyTuple_GET_SIZE(strides) != rank - 1)
    return PyErr_SetString(PyExc_ValueError, "a map's ranks differ"), 0;
  m->rank = (cuuint32_t)rank;
  if (!read_place(address, p, &m->address)) return 0;
  for (Py_ssize_t i = 0; i < rank; ++i) {
    if (!read_place(PyTuple_GET_ITEM(dims, i), p, &m->dims[i])) return 0;
    m->box[i] = (cuuint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(box, i));
    if (i + 1 < rank) m->strides[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(strides, i));
  }
  return !PyErr_Occurred();
}

static void attribute(Step *s, CUlaunchAttribute made) { s->attributes[s->config.numAttrs++] = made; }

/* (0, function, grid x, y, z, warps, shared, ctas, cooperative, pdl, params), where a parameter is (kind, slot or map,
   offset or number): 0 is of 64 bits, 1 of 32, 2 a map */
static int read_launch(PyObject *x, Program *p, Step *s, uint64_t **cell, void ***param, Patch **patch) {
  int kind, warps, ctas, cooperative, pdl;
  unsigned int gx, gy, gz, shared;
  unsigned long long function;
  PyObject *params;
  if (!PyArg_ParseTuple(x, "iKIIIiIippO!", &kind, &function, &gx, &gy, &gz, &warps, &shared, &ctas, &cooperative, &pdl,
                        &PyTuple_Type, &params))
    return 0;
  s->function = (CUfunction)(uintptr_t)function;
  s->config = (CUlaunchConfig){gx * ctas, gy, gz, 32 * warps, 1, 1, shared, NULL, s->attributes, 0};
  if (pdl) {
    CUlaunchAttribute made = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
    made.value.programmaticStreamSerializationAllowed = 1;
    attribute(s, made);
  }
  if (cooperative) {
    CUlaunchAttribute made = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE};
    made.value.cooperative = 1;
    attribute(s, made);
  }
  if (ctas != 1) {
    CUlaunchAttribute size = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
    size.value.clusterDim.x = ctas;
    size.value.clusterDim.y = size.value.clusterDim.z = 1;
    attribute(s, size);
    CUlaunchAttribute policy = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE};
    policy.value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    attribute(s, policy);
  }
  s->params = *param;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params); ++i) {
    int what;
    Place place;
    long long offset;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(params, i), "iiL", &what, &place.slot, &offset)) return 0;
    place.offset = offset;
    if (place.slot < (what == 2 ? 0 : -1) || place.slot >= (what == 2 ? p->maps : p->slots) || what < 0 || what > 2)
      return PyErr_SetString(PyExc_ValueError, "no such parameter"), 0;
    if (what == 2) {
      *(*param)++ = &p->encoded[place.slot];
      continue;
    }
    **cell = (uint64_t)offset;
    if (place.slot >= 0) *(*patch)++ = (Patch){place, *cell, what == 1};
    *(*param)++ = (*cell)++;
  }
  return 1;
}

static int read_step(PyObject *x, Program *p, Step *s, uint64_t **cell, void ***param, Patch **patch) {
  PyObject *to, *from = NULL;
  Py_ssize_t bytes;
  if (!PyTuple_Check(x) || PyTuple_GET_SIZE(x) < 1) return PyErr_SetString(PyExc_TypeError, "a step is a tuple"), 0;
  s->kind = (int)PyLong_AsLong(PyTuple_GET_ITEM(x, 0));
  if (s->kind == LAUNCH) return !PyErr_Occurred() && read_launch(x, p, s, cell, param, patch);
  int kind, read = s->kind == FILL   ? PyArg_ParseTuple(x, "iO!n", &kind, &PyTuple_Type, &to, &bytes)
                   : s->kind == COPY ? PyArg_ParseTuple(x, "iO!O!n", &kind, &PyTuple_Type, &to, &PyTuple_Type, &from, &bytes)
                                     : (PyErr_SetString(PyExc_ValueError, "no such step"), 0);
  if (!read || !read_place(to, p, &s->to) || (from && !read_place(from, p, &s->from))) return 0;
  s->bytes = (size_t)bytes;
  return 1;
}

static void dealloc(PyObject *self) {
  Program *p = (Program *)self;
  free(p->step);
  free(p->map);
  free(p->patch);
  free(p->encoded);
  free(p->cells);
  free(p->params);
  pthread_mutex_destroy(&p->lock);
  PyObject_Free(self);
}

static PyTypeObject ProgramType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "onchip.Program",
    .tp_basicsize = sizeof(Program),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Program, call),
    .tp_call = PyVectorcall_Call,
    .tp_dealloc = dealloc,
    .tp_doc = "Runs its steps on a stream.",
};

/* program(device, slots, maps, steps) */
static PyObject *program(PyObject *module, PyObject *args) {
  int device;
  Py_ssize_t slots, count = 0;
  PyObject *maps, *steps;
  if (!PyArg_ParseTuple(args, "inO!O!", &device, &slots, &PyTuple_Type, &maps, &PyTuple_Type, &steps)) return NULL;
  if (!driver.launch) return PyErr_Format(PyExc_RuntimeError, "no driver is loaded");
  Program *p = PyObject_New(Program, &ProgramType);
  if (!p) return NULL;
  memset((char *)p + sizeof(PyObject), 0, sizeof(Program) - sizeof(PyObject));
  pthread_mutex_init(&p->lock, NULL);
  p->call = call;
  p->device = device;
  p->slots = slots;
  p->steps = PyTuple_GET_SIZE(steps);
  p->maps = PyTuple_GET_SIZE(maps);
  for (Py_ssize_t i = 0; i < p->steps; ++i) { /* of a launch the parameters are last */
    PyObject *x = PyTuple_GET_ITEM(steps, i);
    PyObject *last = PyTuple_Check(x) && PyTuple_GET_SIZE(x) ? PyTuple_GET_ITEM(x, PyTuple_GET_SIZE(x) - 1) : NULL;
    if (last && PyTuple_Check(last)) count += PyTuple_GET_SIZE(last);
  }
  p->step = calloc(p->steps + 1, sizeof(Step));
  p->map = calloc(p->maps + 1, sizeof(Map));
  p->patch = calloc(count + 1, sizeof(Patch));
  p->cells = calloc(count + 1, sizeof(uint64_t));
  p->params = calloc(count + 1, sizeof(void *));
  p->encoded = aligned_alloc(128, sizeof(CUtensorMap) * (p->maps + 1));
  if (!p->step || !p->map || !p->patch || !p->cells || !p->params || !p->encoded) {
    PyErr_NoMemory();
    goto failed;
  }
  uint64_t *cell = p->cells;
  void **param = p->params;
  Patch *patch = p->patch;
  for (Py_ssize_t i = 0; i < p->maps; ++i)
    if (!read_map(PyTuple_GET_ITEM(maps, i), p, &p->map[i])) goto failed;
  for (Py_ssize_t i = 0; i < p->steps; ++i)
    if (!read_step(PyTuple_GET_ITEM(steps, i), p, &p->step[i], &cell, &param, &patch)) goto failed;
  p->patches = patch - p->patch;
  return (PyObject *)p;
failed:
  Py_DECREF(p);
  return NULL;
}

static PyMethodDef methods[] = {
    {"load", load, METH_O, "Find the driver's functions in this library."},
    {"takes", takes, METH_VARARGS, "Whether a kernel's parameters are of these sizes."},
    {"program", program, METH_VARARGS, "A program of maps and steps."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "onchip_program", NULL, -1, methods};

PyMODINIT_FUNC PyInit_onchip_program(void) { return PyType_Ready(&ProgramType) < 0 ? NULL : PyModule_Create(&definition); }
