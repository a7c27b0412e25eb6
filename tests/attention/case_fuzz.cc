// libFuzzer on the reader of stored cases: a good case whose files are edited, cut or replaced. What is
// accepted must also plan and run without a fault.
#include <cstring>

#include "attention/cases/random_case.h"
#include "attention/cases/stored_case.h"

using namespace kvasir::attention;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  CaseOptions small;
  small.max_kvlen = 60;
  small.max_work = 30'000;
  small.max_head_dim = 64;
  CaseFiles files = format_case(random_case(data[0] & 63, small));
  if (data[0] & 64) {
    files["case.json"].assign(data + 1, data + size);
  } else {
    for (size_t i = 1; i + 4 < size; i += 5) {
      auto file = std::next(files.begin(), data[i] % long(files.size()));
      uint16_t at;
      std::memcpy(&at, data + i + 1, 2);
      kvasir::attention::Bytes& bytes = file->second;
      if (data[i + 3] == 0xff)
        bytes.resize(std::min<size_t>(bytes.size(), at));
      else if (at < bytes.size())
        bytes[at] = data[i + 4];
    }
  }
  kvasir::Result<Case> c = parse_case(files);
  if (!c.ok() || c->tokens() * c->max_kvlen > 100'000) return 0;
  CaseOutput out;
  (void)run_case(*c, **find_backend("cpu"), {}, &out);
  return 0;
}
