// A batch of tokens, of which each server gets the part that it holds experts for.
#pragma once

#include <cstdint>

namespace expertd::cluster {

struct Batch {
  const char* hidden;   // [tokens] rows of hidden_row bytes
  const char* scales;   // of e4m3 hidden states; null = none
  const void* ids;      // [tokens, top_k] i64 where wide_ids, else i32; -1 = nobody's
  const char* weights;  // [tokens] rows of weights_row bytes
  int64_t hidden_row, scales_row, weights_row;
  int64_t tokens, top_k;
  int64_t wide_ids;
};

// Which of the servers of a call computes which expert.
struct Owners {
  const int64_t* group_of;         // [experts]: -1 = nobody holds it
  const int32_t* owner_of_group;   // [groups]: number of the server
  int64_t experts, count;          // count: of servers
};

// Where the rows of a part go, each as in Batch.
struct Room {
  char *hidden, *scales, *ids, *weights;
};

// rows: [count], ascending, the tokens that `owner` gets; null = all of the batch.  Routes to others become -1.
void gather(const Batch& batch, const Owners& owners, int64_t owner, const int64_t* rows, int64_t count, const Room& to);

}  // namespace expertd::cluster
