#include "batch.h"

#include <algorithm>
#include <cstring>

#include "gather.h"
#include "server_side.h"

namespace expertd {
namespace {

constexpr uint32_t kRowsAPiece = 32;  // copy engines lose on shorter pieces
constexpr uint64_t kAligned = 16;

// Whether a request's e4m3 goes to the device as it is, codes and then scales in the place of its rows (where both fit:
// a row of such an H has 2 bytes a column or more), and is widened there: half the bytes, and nothing to compute here.
bool travels_as_e4m3(const Forward& f, uint64_t H) { return f.hidden_dtype == kE4m3 && H % kAligned == 0; }

char* row_of(void* base, uint64_t row, uint64_t H, const Config& c) {
  return static_cast<char*>(base) + row * H * size_of(c.compute_dtype);
}

}  // namespace

void gather_here(BatchSlot& batch_slot, const Config& config, Run* run) {
  const LayerFacts& layer = batch_slot.layer->facts;
  const BatchSlotMemory& m = batch_slot.memory;
  const uint64_t H = layer.hidden_size;
  const Forward& only = batch_slot.items.front()->f;
  const bool alone = batch_slot.items.size() == 1;
  const bool in_place = config.nonfinite == kPass && alone && only.hidden_dtype == config.compute_dtype &&
                        only.hidden % kAligned == 0;  // else what is read has to stay what was looked at
  batch_slot.in_place_out = alone && only.out_dtype == config.compute_dtype && only.out % kAligned == 0;
  batch_slot.rows = batch_slot.tokens;
  batch_slot.bad.assign(batch_slot.items.size(), Bad{});
  batch_slot.routes.assign(batch_slot.items.size(), 0);
  uint64_t row = 0;
  for (size_t i = 0; i < batch_slot.items.size(); ++i) {
    const Forward& f = batch_slot.items[i]->f;
    if (!in_place) {
      char* x = row_of(m.hidden, row, H, config);
      load_floats(x, config.compute_dtype, reinterpret_cast<void*>(f.hidden), f.hidden_dtype, reinterpret_cast<float*>(f.scales),
                  f.tokens, H);
      settle_floats(x, config.compute_dtype, f.tokens, H, config.nonfinite, &batch_slot.bad[i]);
    }
    batch_slot.routes[i] = load_routes(f, layer, batch_slot.top_k, m.slots + row * batch_slot.top_k, m.weights + row * batch_slot.top_k,
                                 layer.expert_tokens, config.nonfinite, &batch_slot.bad[i]);
    row += f.tokens;
  }
  run->hidden = in_place ? only.hidden : uint64_t(m.hidden);
  run->slots = uint64_t(m.slots);
  run->weights = uint64_t(m.weights);
  run->out = batch_slot.in_place_out ? only.out : uint64_t(m.out);
}

void write_table(BatchSlot& batch_slot, const Config& config) {
  const LayerFacts& layer = batch_slot.layer->facts;
  const BatchSlotMemory& m = batch_slot.memory;
  const uint64_t H = layer.hidden_size;
  const bool looked_at = config.nonfinite != kPass;  // here, so tensors of sessions in shared memory are staged, too
  uint64_t staged = 0, staged_routes = 0, outputs = 0;
  uint64_t* line = m.table;
  batch_slot.bad.assign(batch_slot.items.size(), Bad{});
  for (size_t i = 0; i < batch_slot.items.size(); ++i) {
    const Item* item = batch_slot.items[i];
    Forward f = item->f;
    if (!item->connection || looked_at) {
      char* x = row_of(m.hidden, staged, H, config);
      if (travels_as_e4m3(f, H) && !looked_at) {
        char* scales = x + f.tokens * H;
        memcpy(x, reinterpret_cast<void*>(f.hidden), f.tokens * H);
        memcpy(scales, reinterpret_cast<void*>(f.scales), e4m3::scales_bytes(f.tokens, H));
        f.scales = uint64_t(scales);
      } else {
        load_floats(x, config.compute_dtype, reinterpret_cast<void*>(f.hidden), f.hidden_dtype,
                    reinterpret_cast<float*>(f.scales), f.tokens, H);
        settle_floats(x, config.compute_dtype, f.tokens, H, config.nonfinite, &batch_slot.bad[i]);
        f.hidden_dtype = config.compute_dtype;
        f.scales = 0;
      }
      load_ids(f, m.slots + staged_routes, m.weights + staged_routes, config.nonfinite);
      f.hidden = uint64_t(x);
      f.ids = uint64_t(m.slots + staged_routes);
      f.weights = uint64_t(m.weights + staged_routes);
      f.ids_dtype = kI32;
      f.weights_dtype = kF32;
      staged += f.tokens;
      staged_routes += uint64_t(f.tokens) * f.top_k;
    }
    if (is_output_staged(*item)) {
      f.out = uint64_t(row_of(m.out, outputs, H, config));
      f.out_dtype = config.compute_dtype;
      outputs += f.tokens;
    }
    const uint64_t info = uint64_t(f.hidden_dtype) | uint64_t(f.ids_dtype) << 4 | uint64_t(f.weights_dtype) << 8 |
                          uint64_t(f.out_dtype) << 12 | uint64_t(f.top_k) << 16 | uint64_t(layer.num_experts) << 32;
    const uint64_t hidden_step = H * size_of(f.hidden_dtype), out_step = H * size_of(f.out_dtype);
    const uint64_t ids_step = f.top_k * size_of(f.ids_dtype), weights_step = f.top_k * size_of(f.weights_dtype);
    const uint64_t scales_step = f.scales ? e4m3::scales_bytes(1, H) : 0;
    for (uint64_t i = 0; i < f.tokens; ++i, line += kWords) {
      line[0] = f.hidden + i * hidden_step;
      line[1] = f.ids + i * ids_step;
      line[2] = f.weights + i * weights_step;
      line[3] = f.out + i * out_step;
      line[4] = info;
      line[5] = f.scales + i * scales_step;
      line[6] = layer.device_slots;
      line[7] = layer.device_counts;
    }
  }
}

void pad_table(BatchSlot& batch_slot, uint32_t rows) {
  for (uint64_t i = batch_slot.tokens; i < rows; ++i) batch_slot.memory.table[i * kWords + 4] = 0;
  batch_slot.rows = rows;
}

bool on_device(const BatchSlot& batch_slot) {
  return std::all_of(batch_slot.items.begin(), batch_slot.items.end(), [](const Item* i) { return i->f.on_device; });
}

bool movable(const BatchSlot& batch_slot, const Config& config) {
  uint32_t on_host = 0;
  for (const Item* i : batch_slot.items) on_host += i->f.on_device ? 0 : i->f.tokens;
  if (on_host < config.streamed_rows || batch_slot.items.size() * kRowsAPiece > batch_slot.tokens) return false;
  const bool takes_e4m3 = batch_slot.layer->facts.takes_e4m3 && config.nonfinite == kPass;  // else what is staged is wide
  return std::all_of(batch_slot.items.begin(), batch_slot.items.end(), [&](const Item* i) {
    if (i->f.hidden_dtype == kE4m3 && !takes_e4m3) return false;
    if (!i->connection) return true;
    const bool as_it_is = i->f.hidden_dtype == config.compute_dtype || i->f.hidden_dtype == kE4m3;
    return as_it_is && i->f.out_dtype == config.compute_dtype;
  });
}

int copy_in(const BatchSlot& batch_slot, const Config& config, Cuda& cuda) {
  const BatchSlotMemory& m = batch_slot.memory;
  const uint64_t H = batch_slot.layer->facts.hidden_size, row_bytes = H * size_of(config.compute_dtype);
  uint64_t row = 0;
  int error = 0;
  for (const Item* item : batch_slot.items) {
    const auto copy = [&](uint64_t to, uint64_t from, size_t bytes) {
      error |= item->f.on_device ? cuda.on_device(to, from, bytes, cuda.in)
                                 : cuda.to_device(to, reinterpret_cast<void*>(from), bytes, cuda.in);
    };
    const uint64_t* line = m.table + row * kWords;
    if (item->f.hidden_dtype == kE4m3) {
      copy(m.device_codes + row * H, line[0], item->f.tokens * H);
      copy(m.device_scales + e4m3::scales_bytes(row, H), line[5], e4m3::scales_bytes(item->f.tokens, H));
    } else {
      copy(m.device_hidden + row * row_bytes, line[0], item->f.tokens * row_bytes);
    }
    row += item->f.tokens;
  }
  return error;
}

int copy_out(const BatchSlot& batch_slot, const Config& config, Cuda& cuda) {
  const uint64_t row_bytes = uint64_t(batch_slot.layer->facts.hidden_size) * size_of(config.compute_dtype);
  uint64_t row = 0;
  int error = 0;
  for (const Item* item : batch_slot.items) {
    const uint64_t from = batch_slot.memory.device_out + row * row_bytes, to = batch_slot.memory.table[row * kWords + 3];
    const size_t bytes = item->f.tokens * row_bytes;
    error |= item->f.on_device ? cuda.on_device(to, from, bytes, cuda.out)
                               : cuda.to_host(reinterpret_cast<void*>(to), from, bytes, cuda.out);
    row += item->f.tokens;
  }
  return error;
}

uint32_t scatter(const BatchSlot& batch_slot, const Config& config, size_t i, uint64_t row, uint64_t staged, Bad* bad) {
  const Item* item = batch_slot.items[i];
  const Forward& f = item->f;
  const uint64_t H = batch_slot.layer->facts.hidden_size;
  uint32_t routes = 0;
  *bad = batch_slot.bad[i];
  if (config.device) {
    const uint32_t* v = batch_slot.memory.verdicts + 2 * row;
    for (uint32_t t = 0; t < f.tokens; ++t, v += 2) {
      routes += v[0];
      if (v[1] && !bad->any) {
        *bad = {true, (v[1] >> 31) != 0, t, (v[1] & 0x7fffffff) - 1, 0};
        bad->value = bad_value(f, batch_slot.layer->facts, *bad);
      }
    }
  } else {
    routes = batch_slot.routes[i];
  }
  if (bad->any) return 0;
  const bool copied = config.device ? is_output_staged(*item) : !batch_slot.in_place_out;
  if (copied)
    store_floats(reinterpret_cast<void*>(f.out), f.out_dtype, row_of(batch_slot.memory.out, config.device ? staged : row, H, config),
                 config.compute_dtype, f.tokens, H);
  return routes;
}

}  // namespace expertd
