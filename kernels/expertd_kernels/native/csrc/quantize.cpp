#include "quantize.h"

#include "context.h"
#include "processor.h"

using namespace expertd;

extern "C" int32_t expertd_cpu_round(expertd_context* context, const expertd_rounding* asked) {
  if (!context || !asked) return EXPERTD_BAD_ARGUMENT;
  const expertd_rounding& a = *asked;
  if (a.block < 8 || a.block % 8 || a.columns % a.block || a.rows < 0 || a.rows_of_part < 1 || a.count < 1) return EXPERTD_BAD_ARGUMENT;
  if (!a.tries || !a.weights || !a.second || !a.codes || !a.scales || (a.kind == EXPERTD_ROUND_INT4_ZEROS) != (a.zeros != nullptr))
    return EXPERTD_BAD_ARGUMENT;
  if (a.kind < EXPERTD_ROUND_INT4 || a.kind > EXPERTD_ROUND_E4M3 || (a.source != EXPERTD_BF16 && a.source != EXPERTD_F32))
    return EXPERTD_BAD_ARGUMENT;
#if defined(__x86_64__) && !defined(EXPERTD_ONLY_PORTABLE)
  const RoundRows rows = processor().avx2 && context->level != &kPortable ? kRoundRowsAvx2 : round_rows;
#else
  const RoundRows rows = round_rows;
#endif
  const int64_t some = std::max<int64_t>(1, (1 << 16) / a.columns), units = (a.rows + some - 1) / some;
  if (units > INT32_MAX) return EXPERTD_BAD_ARGUMENT;
  std::lock_guard<std::mutex> lock(context->busy);
  try {
    for (ThreadScratch& s : context->scratch) s.row.get<float>(4 * size_t(a.block));
  } catch (const std::bad_alloc&) {
    return EXPERTD_NO_MEMORY;
  }
  context->pool.run_even(int(units), [&](int unit, int thread) {
    rows(a, unit * some, std::min(a.rows, (unit + 1) * some), context->scratch[thread].row.get<float>(4 * size_t(a.block)));
  });
  return EXPERTD_OK;
}
