#include "quantize.h"

namespace expertd {

const RoundRows kRoundRowsAvx2 = round_rows;

}  // namespace expertd
