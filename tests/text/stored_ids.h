// The ids that others' tokenizers gave the 10,000 strings of data/strings.json, as the scripts beside this store them:
// a hash of 24 bits a string.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/text/text.h"

namespace kvasir::text {

inline nlohmann::json stored(const std::string& name) {
  std::ifstream in("tests/text/data/" + name + ".json");
  return nlohmann::json::parse(in);
}

inline std::string from_base64(const std::string& text) {
  static const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int have = 0;
  for (const char c : text.substr(0, text.find('='))) {
    bits = bits << 6 | uint32_t(letters.find(c)), have += 6;
    if (have >= 8) out += char(bits >> (have -= 8) & 255);
  }
  return out;
}

inline uint32_t crc24(const std::vector<int32_t>& ids) {
  std::string s;
  for (const int32_t id : ids) s += (s.empty() ? "" : ",") + std::to_string(id);
  uint32_t crc = ~0u;
  for (const char c : s) {
    crc ^= uint8_t(c);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc & 0xffffff;
}

inline void expect_stored_ids(const Tokenizer& t, const std::string& hashes) {
  const std::vector<std::string> texts = stored("strings");
  const std::string want = from_base64(hashes);
  ASSERT_EQ(want.size(), 3 * texts.size());
  int different = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto ids = t.encode(texts[i], false, false);
    ASSERT_TRUE(ids.ok()) << ids.status().to_string();
    uint32_t h = 0;
    for (size_t k = 3; k-- > 0;) h = h << 8 | uint8_t(want[3 * i + k]);
    if (crc24(*ids) != h && ++different <= 5)
      ADD_FAILURE() << i << " " << nlohmann::json(texts[i]).dump(-1, ' ', true) << ": " << nlohmann::json(*ids).dump();
  }
  EXPECT_EQ(different, 0);
}

}  // namespace kvasir::text
