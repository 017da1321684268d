// The server's side of a region without a server behind it: for who carries requests further, and answers back.
#include <cstddef>
#include <cstring>

#include "layout.h"
#include "port.h"

#define API extern "C" __attribute__((visibility("default")))

using namespace expertd;

// Lays out a region of zeroed memory.
API Port* expertd_shm_host(void* base, uint64_t bytes, uint32_t entries, int bell) {
  return new Port(Session{0, base, bytes, 0, 0, entries, 0, bell});
}
API void expertd_shm_host_free(Port* p) { delete p; }

// The next submission, copied; 0: there is none now.  All but cancels want an answer.
API int expertd_shm_host_take(Port* p, shm::Submission* s) {
  if (!p->take(s)) return 0;
  if (s->kind != shm::kCancel) ++p->in_flight;
  return 1;
}

// The answer to the submission of the same id.
API void expertd_shm_host_answer(Port* p, const shm::Completion* answer) {
  shm::Completion& to = p->open(answer->id);
  constexpr size_t kFrom = offsetof(shm::Completion, refused);
  memcpy(reinterpret_cast<char*>(&to) + kFrom, reinterpret_cast<const char*>(answer) + kFrom, sizeof to - kFrom);
  --p->in_flight;
  p->publish(to);
}

// Whether the client shall ring for its next submission.
API void expertd_shm_host_sleeps(Port* p, int now) { p->sleeps(now != 0); }

// Nothing more is answered.
API void expertd_shm_host_end(Port* p) { p->end(); }
