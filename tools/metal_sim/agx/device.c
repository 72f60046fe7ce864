// Stand-in for the kernel driver of an Apple GPU, so that Mesa's compiler runs where there is no such GPU.
//
// The program links this file with -rdynamic, so that these functions replace libc's open and ioctl, and libdrm's search
// for devices. Written from drm/asahi_drm.h and drm/drm.h. Buffers are parts of one memory file. Nothing is ever
// launched: submissions fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <drm/asahi_drm.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xf86drm.h>

#include "device.h"

#define NODE "/dev/dri/renderD128"
#define PAGE 16384ul
#define MEMORY (64ul << 30)  // size of the memory file in bytes; pages that nothing touches take no memory
#define MAX_BUFFERS 65536

uint32_t agx_generation = 13;

static int memory = -1;
static uint64_t used;  // bytes of the memory file
static uint64_t offsets[MAX_BUFFERS];
static uint32_t num_buffers, num_objects;

static int open_device(void) {
  if (memory < 0) {
    memory = memfd_create("agx", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, MEMORY)) abort();
  }
  return fcntl(memory, F_DUPFD_CLOEXEC, 3);
}

static void get_params(const struct drm_asahi_get_params* request) {
  struct drm_asahi_params_global params = {
      .gpu_generation = agx_generation,
      .gpu_variant = 'G',
      .chip_id = agx_generation == 13 ? 0x8103 : 0x8112,
      .num_dies = 1,
      .num_clusters_total = 1,
      .num_cores_per_cluster = 8,
      .max_frequency_khz = 1278000,
      .core_masks = {0xff},
      .vm_start = 1ul << 32,
      .vm_end = 1ul << 39,
      .vm_kernel_min_size = 1ul << 35,
      .max_commands_per_submission = 64,
      .max_attachments = 16,
      .command_timestamp_frequency_hz = 24000000,
  };
  const size_t size = request->size < sizeof(params) ? request->size : sizeof(params);
  memcpy((void*)(uintptr_t)request->pointer, &params, size);
}

static int create_buffer(struct drm_asahi_gem_create* request) {
  if (num_buffers + 1 == MAX_BUFFERS || used + request->size > MEMORY) return ENOMEM;
  request->handle = ++num_buffers;
  offsets[request->handle] = used;
  used += (request->size + PAGE - 1) / PAGE * PAGE;
  return 0;
}

// Copies as much as there is room for. Returns the length of all of it.
static size_t copy(char* to, size_t room, const char* text) {
  const size_t length = strlen(text);
  if (to) memcpy(to, text, room < length ? room : length);
  return length;
}

static void get_version(struct drm_version* version) {
  version->version_major = 1;
  version->version_minor = version->version_patchlevel = 0;
  version->name_len = copy(version->name, version->name_len, "asahi");
  version->date_len = copy(version->date, version->date_len, "20250101");
  version->desc_len = copy(version->desc, version->desc_len, "stand-in");
}

// Answers a request of DRM's. Returns an error number, or 0.
static int answer(unsigned long request, void* data) {
  // Structures grow at their end, so requests are told apart by their numbers.
  switch (_IOC_NR(request)) {
    case _IOC_NR(DRM_IOCTL_VERSION): get_version(data); return 0;
    case _IOC_NR(DRM_IOCTL_GET_CAP): {
      struct drm_get_cap* cap = data;
      const uint64_t id = cap->capability;
      cap->value = id == DRM_CAP_PRIME ? DRM_PRIME_CAP_IMPORT | DRM_PRIME_CAP_EXPORT
                                       : id == DRM_CAP_SYNCOBJ || id == DRM_CAP_SYNCOBJ_TIMELINE;
      return 0;
    }
    case _IOC_NR(DRM_IOCTL_GEM_CLOSE): return 0;
    case _IOC_NR(DRM_IOCTL_PRIME_HANDLE_TO_FD): ((struct drm_prime_handle*)data)->fd = open_device(); return 0;
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_CREATE): ((struct drm_syncobj_create*)data)->handle = ++num_objects; return 0;
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_HANDLE_TO_FD): ((struct drm_syncobj_handle*)data)->fd = open_device(); return 0;
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE):
      ((struct drm_syncobj_handle*)data)->handle = ++num_objects;
      return 0;
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_DESTROY):
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_WAIT):
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_RESET):
    case _IOC_NR(DRM_IOCTL_SYNCOBJ_SIGNAL): return 0;
    case _IOC_NR(DRM_IOCTL_ASAHI_GET_PARAMS): get_params(data); return 0;
    case _IOC_NR(DRM_IOCTL_ASAHI_GET_TIME): ((struct drm_asahi_get_time*)data)->gpu_timestamp = 1; return 0;
    case _IOC_NR(DRM_IOCTL_ASAHI_VM_CREATE): ((struct drm_asahi_vm_create*)data)->vm_id = ++num_objects; return 0;
    case _IOC_NR(DRM_IOCTL_ASAHI_QUEUE_CREATE): ((struct drm_asahi_queue_create*)data)->queue_id = ++num_objects; return 0;
    case _IOC_NR(DRM_IOCTL_ASAHI_VM_DESTROY):
    case _IOC_NR(DRM_IOCTL_ASAHI_QUEUE_DESTROY):
    case _IOC_NR(DRM_IOCTL_ASAHI_VM_BIND): return 0;
    case _IOC_NR(DRM_IOCTL_ASAHI_GEM_CREATE): return create_buffer(data);
    case _IOC_NR(DRM_IOCTL_ASAHI_GEM_MMAP_OFFSET): {
      struct drm_asahi_gem_mmap_offset* map = data;
      if (!map->handle || map->handle > num_buffers) return EINVAL;
      map->offset = offsets[map->handle];
      return 0;
    }
    case _IOC_NR(DRM_IOCTL_ASAHI_GEM_BIND_OBJECT):
      ((struct drm_asahi_gem_bind_object*)data)->object_handle = ++num_objects;
      return 0;
  }
  return ENOTTY;
}

int ioctl(int fd, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void* data = va_arg(rest, void*);
  va_end(rest);
  if (_IOC_TYPE(request) != DRM_IOCTL_BASE) {
    int (*original)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
    return original(fd, request, data);
  }
  const int error = answer(request, data);
  if (!error) return 0;
  fprintf(stderr, "error: the stand-in for the driver has no answer to request %#lx: %s\n", request, strerror(error));
  errno = error;
  return -1;
}

// Mesa reads its library of OpenCL functions from a fixed folder. AGX_ROOT is the root that the packages are unpacked in.
static const char* redirected(const char* path, char* buffer) {
  static const char folder[] = "/usr/lib/clc/";
  const char* root = getenv("AGX_ROOT");
  if (!root || strncmp(path, folder, sizeof(folder) - 1)) return path;
  snprintf(buffer, PATH_MAX, "%s%s", root, path);
  return buffer;
}

static mode_t mode_of(int flags, va_list rest) {
  return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

// openat serves all: open, and the variants for large files, which are the same on 64 bits.
static int open_any(int at, const char* path, int flags, mode_t mode) {
  if (!strcmp(path, NODE)) return open_device();
  char buffer[PATH_MAX];
  int (*original)(int, const char*, int, ...) = dlsym(RTLD_NEXT, "openat");
  return original(at, redirected(path, buffer), flags, mode);
}

#define OPEN(name, at, ...)                              \
  int name(__VA_ARGS__ const char* path, int flags, ...) { \
    va_list rest;                                        \
    va_start(rest, flags);                               \
    const mode_t mode = mode_of(flags, rest);            \
    va_end(rest);                                        \
    return open_any(at, path, flags, mode);              \
  }
#define COMMA ,
OPEN(open, AT_FDCWD)
OPEN(open64, AT_FDCWD)
OPEN(openat, folder, int folder COMMA)
OPEN(openat64, folder, int folder COMMA)
#undef OPEN
#undef COMMA

static char* compatible[] = {"apple,gpu-g13g", NULL};
static char* nodes[DRM_NODE_MAX] = {[DRM_NODE_RENDER] = NODE};
static drmPlatformBusInfo bus = {"/soc/gpu"};
static drmPlatformDeviceInfo info = {compatible};
static drmDevice device = {
    .nodes = nodes,
    .available_nodes = 1 << DRM_NODE_RENDER,
    .bustype = DRM_BUS_PLATFORM,
    .businfo.platform = &bus,
    .deviceinfo.platform = &info,
};

int drmGetDevices2(uint32_t flags, drmDevicePtr devices[], int max_devices) {
  if (devices && max_devices > 0) devices[0] = &device;
  return 1;
}
int drmGetDevice2(int fd, uint32_t flags, drmDevicePtr* found) {
  *found = &device;
  return 0;
}
int drmGetDeviceFromDevId(dev_t id, uint32_t flags, drmDevicePtr* found) {
  *found = &device;
  return 0;
}
void drmFreeDevice(drmDevicePtr* found) { *found = NULL; }
void drmFreeDevices(drmDevicePtr devices[], int count) {}
char* drmGetRenderDeviceNameFromFd(int fd) { return strdup(NODE); }
int drmGetNodeTypeFromFd(int fd) { return DRM_NODE_RENDER; }
