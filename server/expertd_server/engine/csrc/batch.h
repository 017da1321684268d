// What a batch does with memory: requests side by side before the experts, rows back to their callers after them.
#pragma once

#include "core.h"
#include "cuda.h"
#include "layer.h"
#include "queues.h"

namespace expertd {

constexpr uint32_t kWords = 8;  // of a row of a batch slot's table (expertd_kernels/backends/gather/table.py)

// On a CPU: the tensors that the experts take and give.  A batch of one request is read and written in place where its
// types and addresses allow; its ids and weights are copied, then checked.
void gather_here(BatchSlot& batch_slot, const Config& config, Run* run);

// For a device: one line a row.  What the device cannot read is copied into the batch slot's pinned memory first.
void write_table(BatchSlot& batch_slot, const Config& config);
// The rest of the table up to `rows`: rows without routes.
void pad_table(BatchSlot& batch_slot, uint32_t rows);

// Whether all rows lie on the device already: then collect and deliver are short, and one launch is worth most.
bool on_device(const BatchSlot& batch_slot);
// Whether copy engines can and should move the batch: enough rows on the host, in few pieces, in the type that the experts
// compute in.
bool movable(const BatchSlot& batch_slot, const Config& config);
// Hidden states in and outputs out by the copy engines.  A CUDA error, or 0.
int copy_in(const BatchSlot& batch_slot, const Config& config, Cuda& cuda);
int copy_out(const BatchSlot& batch_slot, const Config& config, Cuda& cuda);

// Whether the device delivers a request's rows into the batch slot's own memory, in the compute dtype: no device of ours writes
// into that of a transport in this process, or e4m3.
inline bool is_output_staged(const Item& i) { return !i.connection || i.f.out_dtype == kE4m3; }

// After the experts: item `i`, whose first row is `row` (`staged` of them before it in the batch slot's own memory), gets its
// rows, unless it is bad.  Returns its routes.
uint32_t scatter(const BatchSlot& batch_slot, const Config& config, size_t i, uint64_t row, uint64_t staged, Bad* bad);

}  // namespace expertd
