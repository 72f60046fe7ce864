// Has Mesa's OpenCL compile kernels for an Apple GPU: compile GENERATION FILE.spv...
//
// With AGX_MESA_DEBUG=shaderdb,shaders the compiler prints statistics on standard error and machine code on standard
// output. On both, a line "kernel FILE" stands before what belongs to a file, and "done FILE" behind.
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "device.h"

static void check(cl_int error, const char* what) {
  if (error == CL_SUCCESS) return;
  fprintf(stderr, "error: %s: %d\n", what, error);
  exit(1);
}

static char* read_file(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) {
    perror(path);
    exit(1);
  }
  *size = ftell(file);
  rewind(file);
  char* data = malloc(*size);
  if (fread(data, 1, *size, file) != *size) exit(1);
  fclose(file);
  return data;
}

static void mark(const char* what, const char* path) {
  fprintf(stdout, "%s %s\n", what, path);
  fflush(stdout);
  fprintf(stderr, "%s %s\n", what, path);
}

static void compile(cl_context context, cl_device_id device, const char* path) {
  size_t size;
  cl_int error;
  char* code = read_file(path, &size);
  mark("kernel", path);
  cl_program program = clCreateProgramWithIL(context, code, size, &error);
  check(error, "clCreateProgramWithIL");
  error = clBuildProgram(program, 1, &device, "", NULL, NULL);
  if (error != CL_SUCCESS) {
    static char log[1 << 16];
    clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, sizeof(log), log, NULL);
    fprintf(stderr, "%s\n", log);
  }
  check(error, "clBuildProgram");
  clReleaseProgram(program);
  mark("done", path);
  free(code);
}

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: %s GENERATION FILE.spv...\n", argv[0]);
    return 2;
  }
  agx_generation = atoi(argv[1]);
  cl_platform_id platform;
  cl_device_id device;
  cl_int error;
  check(clGetPlatformIDs(1, &platform, NULL), "clGetPlatformIDs");
  check(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL), "clGetDeviceIDs");
  char name[256] = "";
  clGetDeviceInfo(device, CL_DEVICE_NAME, sizeof(name), name, NULL);
  fprintf(stderr, "device %s\n", name);
  cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &error);
  check(error, "clCreateContext");
  for (int i = 2; i < argc; ++i) compile(context, device, argv[i]);
  _exit(0);
}
