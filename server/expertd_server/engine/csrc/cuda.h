// What is needed of the CUDA driver, found at run time: the library does not depend on it.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <type_traits>
#include <vector>

namespace expertd {

struct Cuda {
  int (*launch)(void* graph, void* stream) = nullptr;
  int (*to_device)(uint64_t to, const void* from, size_t bytes, void* stream) = nullptr;
  int (*to_host)(void* to, uint64_t from, size_t bytes, void* stream) = nullptr;
  int (*on_device)(uint64_t to, uint64_t from, size_t bytes, void* stream) = nullptr;
  int (*record)(void* event, void* stream) = nullptr;
  int (*wait)(void* stream, void* event, unsigned flags) = nullptr;
  int (*write)(void* stream, uint64_t word, uint32_t value, unsigned flags) = nullptr;
  void *compute = nullptr, *in = nullptr, *out = nullptr;  // streams
  std::vector<void*> there, computed;                      // events, by batch slot: inputs are there; experts are done

  // False: the driver lacks something.
  bool load(void* compute_stream, void* in_stream, void* out_stream, uint32_t batch_slots) {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver) return false;
    bool all = true;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(driver, name));
      all &= function != nullptr;
    };
    int (*create)(void**, unsigned) = nullptr;
    find(launch, "cuGraphLaunch");
    find(to_device, "cuMemcpyHtoDAsync_v2");
    find(to_host, "cuMemcpyDtoHAsync_v2");
    find(on_device, "cuMemcpyDtoDAsync_v2");
    find(record, "cuEventRecord");
    find(wait, "cuStreamWaitEvent");
    find(write, "cuStreamWriteValue32_v2");
    find(create, "cuEventCreate");
    compute = compute_stream;
    in = in_stream;
    out = out_stream;
    constexpr unsigned kDisableTiming = 2;
    for (uint32_t i = 0; all && i < batch_slots; ++i)
      for (auto* events : {&there, &computed}) {
        void* event = nullptr;
        all &= create(&event, kDisableTiming) == 0;
        events->push_back(event);
      }
    return all;
  }
};

}  // namespace expertd
