// The writers for Python (expertd/codec/encode.py): each makes one bytes object of its arguments.
//
// It is called with the interpreter held, and calls that itself, by functions of its stable ABI: a message of one token is
// written in the time that ctypes takes to hand over ten arguments, so they come as one tuple.
#include <sys/types.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>

#include "request_form.h"
#include "write.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd::wire;

extern "C" {
struct PyObject;
struct Py_buffer {
  void* buf;
  PyObject* obj;
  ssize_t len, itemsize;
  int readonly, ndim;
  char* format;
  ssize_t *shape, *strides, *suboffsets;
  void* internal;
};
extern PyObject *PyExc_ValueError, *PyExc_BufferError;
extern PyObject* PyTuple_GetItem(PyObject* tuple, ssize_t place);
extern PyObject* PyNumber_Index(PyObject* x);
extern void Py_DecRef(PyObject* x);
extern unsigned long long PyLong_AsUnsignedLongLong(PyObject* x);
extern int PyObject_GetBuffer(PyObject* x, Py_buffer* out, int flags);
extern void PyBuffer_Release(Py_buffer* buffer);
extern PyObject* PyBytes_FromStringAndSize(const char* from, ssize_t bytes);
extern char* PyBytes_AsString(PyObject* bytes);
extern PyObject* PyErr_Occurred();
extern void PyErr_Clear();
extern PyObject* PyErr_Format(PyObject* kind, const char* text, ...);
extern void* PyEval_SaveThread();
extern void PyEval_RestoreThread(void* thread);
extern PyObject _Py_NoneStruct;
}

namespace {

// The items of a tuple, one after another.  After anything wrong `good` is false, and Python's error is set.
class Arguments {
 public:
  explicit Arguments(PyObject* tuple) : tuple_(tuple) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    for (int i = 0; i < held_; ++i) PyBuffer_Release(&buffers_[i]);
  }

  bool good = true;

  uint64_t number(uint64_t most = UINT64_MAX) {
    PyObject* const x = next();
    PyObject* const whole = good ? PyNumber_Index(x) : nullptr;
    if (!whole) return good = false, 0;
    const uint64_t value = PyLong_AsUnsignedLongLong(whole);
    if ((value == UINT64_MAX && PyErr_Occurred()) || value > most) {
      PyErr_Clear();
      PyErr_Format(PyExc_ValueError, "field value: got %R, want a number from 0 to %llu", whole, (unsigned long long)most);
      good = false;
    }
    Py_DecRef(whole);
    return value;
  }

  // At null where it is None.
  std::string_view bytes() {
    PyObject* const x = next();
    if (!good || x == &_Py_NoneStruct) return {};
    Py_buffer* const b = &buffers_[held_];
    if (PyObject_GetBuffer(x, b, 0)) {
      PyErr_Clear();
      PyErr_Format(PyExc_BufferError, "tensor: got %R, want contiguous row-major memory", x);
      return good = false, std::string_view();
    }
    ++held_;
    return {b->buf ? static_cast<const char*>(b->buf) : "", size_t(b->len)};
  }

  TensorOut tensor(const TensorForm& form, std::string_view* elements) {
    *elements = bytes();
    return {elements->data() != nullptr, form.dtype, form.spelling, form.rows, form.columns, elements->size(), form.block, 0};
  }

 private:
  static constexpr int kMost = 8;  // buffers of one message

  PyObject* next() {
    PyObject* const x = good ? PyTuple_GetItem(tuple_, place_++) : nullptr;
    good &= x != nullptr;
    return x;
  }

  PyObject* const tuple_;
  ssize_t place_ = 0;
  Py_buffer buffers_[kMost];
  int held_ = 0;
};

// The parts as one bytes object.
PyObject* join(std::initializer_list<std::string_view> parts) {
  constexpr size_t kLong = 1 << 20;  // others may run meanwhile
  size_t size = 0;
  for (const std::string_view part : parts) size += part.size();
  PyObject* const out = PyBytes_FromStringAndSize(nullptr, ssize_t(size));
  if (!out) return nullptr;
  char* at = PyBytes_AsString(out);
  void* const thread = size > kLong ? PyEval_SaveThread() : nullptr;
  for (const std::string_view part : parts) {
    if (!part.empty()) memcpy(at, part.data(), part.size());
    at += part.size();
  }
  if (thread) PyEval_RestoreThread(thread);
  return out;
}

}  // namespace

// arguments: stream, request_id, layer, timeout_us, sent_us, weights_version; hidden states, ids, weights, the scales of the
// first, GroupedRows, traceparent: None or bytes.
API PyObject* expertd_codec_write_request(const RequestForm* form, PyObject* arguments) {
  Arguments next(arguments);
  RequestOut r;
  const bool stream = next.number(1);
  r.id = next.number();
  r.layer = uint32_t(next.number(UINT32_MAX));
  r.timeout_us = next.number();
  r.sent_us = next.number();
  r.weights_version = next.number();
  std::string_view hidden, ids, weights;
  r.hidden = next.tensor(form->hidden, &hidden);
  r.ids = next.tensor(form->ids, &ids);
  r.weights = next.tensor(form->weights, &weights);
  const std::string_view scales = next.bytes();
  r.hidden.scales_bytes = scales.size();
  r.grouped = next.bytes();
  r.traceparent = next.bytes();
  if (!next.good) return nullptr;
  r.output_dtype = form->output_dtype;
  r.output_form = form->output_form;
  r.weight_on_input = form->weight_on_input;
  const RequestText text(r, stream, kAligned);
  return join({text.head, hidden, text.scales, scales, text.ids, ids, text.weights, weights, text.tail});
}

// arguments: stream, request_id, routes_computed, placement_epoch, weights_version; the output's dtype, spelling, rows,
// columns and block of scales; output, its scales, Digest, Timing, Load: None or bytes.
API PyObject* expertd_codec_write_response(PyObject* arguments) {
  Arguments next(arguments);
  ResponseOut r;
  const bool stream = next.number(1);
  const uint64_t id = next.number();
  r.routes_computed = next.number();
  r.placement_epoch = next.number();
  r.weights_version = next.number();
  TensorForm form;
  form.dtype = int32_t(next.number(INT32_MAX));
  form.spelling = uint32_t(next.number(UINT32_MAX));
  form.rows = uint32_t(next.number(UINT32_MAX));
  form.columns = uint32_t(next.number(UINT32_MAX));
  form.block = uint32_t(next.number(UINT32_MAX));
  std::string_view elements;
  TensorOut output = next.tensor(form, &elements);
  const std::string_view scales = next.bytes();
  output.scales_bytes = scales.size();
  r.digest = next.bytes();
  r.timing = next.bytes();
  r.load = next.bytes();
  if (!next.good) return nullptr;
  const std::string tail = response_tail(r);
  const ResponseText text(id, output, tail.size(), stream, kAligned);
  return join({text.head, elements, text.scales, scales, tail});
}
