// e4m3.h for ctypes.
#include "e4m3.h"

extern "C" __attribute__((visibility("default"))) void expertd_e4m3_quantize(const void* from, int kind, int64_t rows,
                                                                             int64_t columns, int64_t stride,
                                                                             void* codes, void* scales) {
  expertd::e4m3::quantize(from, kind, rows, columns, stride, static_cast<uint8_t*>(codes), static_cast<float*>(scales));
}

extern "C" __attribute__((visibility("default"))) void expertd_e4m3_widen(const void* codes, const void* scales,
                                                                          int64_t rows, int64_t columns, void* to,
                                                                          int kind) {
  expertd::e4m3::widen(codes, scales, rows, columns, to, kind);
}
