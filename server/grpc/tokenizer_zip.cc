#include "server/grpc/tokenizer_zip.h"

#include <zlib.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "server/tokenizer_config.h"

namespace kvasir::server::rpc {
namespace {

void put(std::string& out, uint32_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += char(value >> (8 * i) & 255);
}

// What the local header and the directory's entry have in common.
void put_entry(std::string& out, const std::string& name, const std::string& data) {
  put(out, 20, 2);                          // version needed
  put(out, 0, 2);                           // flags
  put(out, 0, 2);                           // method: stored
  put(out, 0, 2);                           // time
  put(out, (46u << 9) | (1u << 5) | 1, 2);  // date: a fixed one, so that the digest is too
  put(out, uint32_t(crc32(0, reinterpret_cast<const Bytef*>(data.data()), uInt(data.size()))), 4);
  put(out, uint32_t(data.size()), 4);
  put(out, uint32_t(data.size()), 4);
  put(out, uint32_t(name.size()), 2);
  put(out, 0, 2);  // extra
}

std::string zip(const std::vector<std::pair<std::string, std::string>>& files) {
  std::string out, directory;
  for (const auto& [name, data] : files) {
    uint32_t at = uint32_t(out.size());
    put(out, 0x04034b50, 4);
    put_entry(out, name, data);
    out += name;
    out += data;
    put(directory, 0x02014b50, 4);
    put(directory, 20, 2);  // made by
    put_entry(directory, name, data);
    put(directory, 0, 4);  // no comment, disk 0
    put(directory, 0, 2);  // internal attributes
    put(directory, 0, 4);  // external attributes
    put(directory, at, 4);
    directory += name;
  }
  uint32_t at = uint32_t(out.size());
  out += directory;
  put(out, 0x06054b50, 4);
  put(out, 0, 4);  // disks
  put(out, uint32_t(files.size()), 2);
  put(out, uint32_t(files.size()), 2);
  put(out, uint32_t(directory.size()), 4);
  put(out, at, 4);
  put(out, 0, 2);  // no comment
  return out;
}

}  // namespace

Result<std::string> tokenizer_zip(const engine::Engine& engine) {
  text::TokenizerPtr tokenizer = engine.tokenizer();
  if (!tokenizer) return failed_precondition("this model came without a tokenizer");
  KVASIR_ASSIGN(std::string tokenizer_json, tokenizer->to_json());
  const nlohmann::ordered_json config = tokenizer_config(engine);
  return zip({{"tokenizer.json", std::move(tokenizer_json)},
              {"tokenizer_config.json", config.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace)}});
}

}  // namespace kvasir::server::rpc
