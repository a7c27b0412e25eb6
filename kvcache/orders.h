// What a step must do to pages before it writes any: moves first, then copies, each list in order.
// Pages are ids; page p of a group holds physical tokens [p*page_size, (p+1)*page_size) of its layers.
#pragma once

#include <cstdint>

namespace kvasir::kvcache {

// In place of a page group: a copy is of a sequence's state, from slot to slot.
constexpr int32_t kStateGroup = -1;

struct PageCopy {
  int32_t from = 0, to = 0;
  int32_t tokens = 0;  // how many of its first tokens matter
  int32_t group = 0;
};
struct PageMove {  // between the device and the host tier
  int32_t device = 0, host = 0;
  bool to_host = false;
};

}  // namespace kvasir::kvcache
