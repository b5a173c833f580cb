// A CUDA driver for tests on machines without one: prints what a launch hands over, and encodes tensor maps as plain numbers.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { int id; char pad[4]; union { char pad[64]; int flag; struct { unsigned x, y, z; } dims; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void* stream; Attribute* attributes; unsigned count; } Config;

static int launch(const Config* config, void* function, void** parameters, void** extra) {
  if (function == (void*)0xbad) return 1;
  printf("function %ld grid %u %u %u block %u shared %u stream %ld", (long)function, config->grid[0], config->grid[1],
         config->grid[2], config->block[0], config->shared, (long)config->stream);
  for (unsigned i = 0; i < config->count; ++i) {
    const Attribute* a = config->attributes + i;
    printf(a->id == 4 ? " cluster %u %u %u" : " overlaps %u", a->value.dims.x, a->value.dims.y, a->value.dims.z);
  }
  // the tests' kernel: (long long, int, float, 128 bytes aligned to 64)
  printf(" values %lld %d %g %d aligned %d\n", *(long long*)parameters[0], *(int*)parameters[1], *(float*)parameters[2],
         ((char*)parameters[3])[127], (int)((uintptr_t)parameters[3] % 64));
  return 0;
}

static int encode(uint64_t* map, int type, unsigned rank, void* address, const uint64_t* extents, const uint64_t* strides,
                  const unsigned* box, const unsigned* steps, int interleave, int swizzle, int l2, int fill) {
  if (extents[0] == 13) return 1;
  memset(map, 0, 128);
  uint64_t numbers[] = {type, rank, (uint64_t)address, extents[0], extents[rank - 1], strides[0], strides[rank - 2], box[0],
                        box[rank - 1], steps[0], swizzle, l2};
  memcpy(map, numbers, sizeof numbers);
  return 0;
}

static int nothing(void) { return 0; }

int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, void* status) {
  *found = !strcmp(name, "cuLaunchKernelEx")         ? (void*)launch
           : !strcmp(name, "cuTensorMapEncodeTiled") ? (void*)encode
           : !strncmp(name, "cuGetProcAddress", 16)  ? (void*)cuGetProcAddress_v2
                                                     : (void*)nothing;
  return 0;
}

int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
