// Partial sums of servers, added up.
#pragma once

#include <cstdint>

namespace expertd::cluster {

struct Part {
  const int64_t* rows;  // its tokens, ascending; null = all
  int64_t count;        // how many
  const void* values;   // [count, hidden]
  int64_t at;           // the next of its rows; 0 at the start
  const void* mine;     // of this token: row number n of those that it has
};

struct Job {
  Part* parts;
  int64_t count;
  int64_t tokens, hidden;
  const float* scale;  // by token; null = 1
  void* out;           // [tokens, hidden]
  int64_t stride;      // bytes from one token's row to the next
};

// Values are f32, or bf16 where it says so.
void join(const Job& job, int in_bf16, int out_bf16);

}  // namespace expertd::cluster
