// What a broken or hostile file says is refused with the file, the tensor and the place.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "core/cat.h"
#include "model/formats/gguf_model.h"
#include "model/formats/safetensors.h"
#include "model/load.h"
#include "tests/model/small_network.h"

namespace kvasir::model {
namespace {

// Writes GGUF bytes; tests bend one thing at a time.
struct Bytes {
  std::string s;
  template <class T>
  Bytes& put(T v) {
    s.append(reinterpret_cast<const char*>(&v), sizeof v);
    return *this;
  }
  Bytes& text(std::string_view t) {
    put(uint64_t(t.size()));
    s += t;
    return *this;
  }
};

struct Spec {
  uint32_t magic = 0x46554747, version = 3, type = 0, dims = 2, alignment = 32;
  uint64_t tensors = 1, values = 2, cols = 4, rows = 2, offset = 0, string_size = 5, array_count = 2;
  size_t cut = 0;
  bool twice = false;
};

std::string make(const Spec& c) {
  Bytes b;
  b.put(c.magic).put(c.version).put(c.tensors).put(c.values);
  b.text("general.alignment").put(uint32_t(4)).put(c.alignment);
  b.text("list").put(uint32_t(9)).put(uint32_t(8)).put(c.array_count);
  b.put(c.string_size).s += "hello";
  b.text("b");
  for (int i = 0; i < (c.twice ? 2 : 1); ++i) {
    b.text(i ? "other" : "w").put(c.dims).put(c.cols);
    if (c.dims == 2) b.put(c.rows);
    b.put(c.type).put(c.offset);
  }
  b.s.resize((b.s.size() + 31) / 32 * 32);
  b.s.append(64, 1);
  b.s.resize(b.s.size() - c.cut);
  return b.s;
}

Result<std::unique_ptr<Gguf>> parse(const std::string& s) {
  return Gguf::parse("test.gguf", {reinterpret_cast<const uint8_t*>(s.data()), s.size()});
}

TEST(GgufFile, AGoodOneIsRead) {
  std::string s = make({});
  auto g = parse(s);
  ASSERT_TRUE(g.ok()) << g.status().to_string();
  EXPECT_EQ((*g)->strings("list"), (std::vector<std::string>{"hello", "b"}));
  ASSERT_NE((*g)->tensor("w"), nullptr);
  EXPECT_EQ((*g)->tensor("w")->bytes, 32);
}

TEST(GgufFile, EachLieIsRefused) {
  struct Case {
    const char* word;
    Spec spec;
  };
  const Case cases[] = {
      {"GGUF", {.magic = 1}},
      {"version", {.version = 9}},
      {"cannot fit", {.tensors = uint64_t(1) << 63}},
      {"cannot fit", {.values = uint64_t(1) << 62}},
      {"zero or too large", {.cols = 0}},
      {"zero or too large", {.cols = uint64_t(1) << 63}},
      {"zero or too large", {.cols = uint64_t(1) << 62, .rows = 8}},
      {"type number", {.type = 77}},
      {"dimensions", {.dims = 9}},
      {"whole blocks", {.type = 2}},
      {"multiple of 32", {.offset = 7}},
      {"truncated", {.offset = 4096}},
      {"truncated", {.offset = uint64_t(INT64_MAX) / 32 * 32}},
      {"truncated", {.cut = 60}},
      {"power of two", {.alignment = 33}},
      {"a string", {.string_size = uint64_t(1) << 63}},
      {"cannot fit", {.array_count = uint64_t(1) << 60}},
      {"overlap", {.tensors = 2, .twice = true}},
  };
  for (const Case& c : cases) {
    std::string s = make(c.spec);
    auto g = parse(s);
    ASSERT_FALSE(g.ok()) << c.word;
    EXPECT_EQ(g.status().code(), Code::invalid_argument);
    EXPECT_NE(g.status().message().find(c.word), std::string::npos) << g.status().message();
    EXPECT_NE(g.status().message().find("test.gguf"), std::string::npos);
  }
}

TEST(GgufFile, EveryTruncationIsRefused) {
  std::string s = make({});
  for (size_t n = 0; n < s.size() - 32; ++n) EXPECT_FALSE(parse(s.substr(0, n)).ok()) << n;
}

TEST(Safetensors, EachLieIsRefused) {
  auto with = [](const std::string& header, size_t data = 64) {
    uint64_t n = header.size();
    return std::string(reinterpret_cast<const char*>(&n), 8) + header + std::string(data, 'x');
  };
  auto tensor = [](const char* dtype, const char* shape, const char* offsets) {
    return std::string("{\"w\":{\"dtype\":\"") + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
           "}}";
  };
  auto refused = [](const std::string& s, const char* word) {
    SafeTensors t;
    Status status = parse_safetensors("f", {reinterpret_cast<const uint8_t*>(s.data()), s.size()}, 0, &t);
    ASSERT_FALSE(status.ok()) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  SafeTensors good;
  std::string s = with(tensor("F32", "[4,4]", "[0,64]"));
  EXPECT_TRUE(parse_safetensors("f", {reinterpret_cast<const uint8_t*>(s.data()), s.size()}, 0, &good).ok());
  refused("abc", "too few");
  refused(std::string(8, '\xff') + "{}", "header claims");
  refused(with("[1]"), "JSON");
  refused(with("{"), "JSON");
  refused(with(std::string(100000, '[')), "JSON");
  refused(with(tensor("I64", "[4]", "[0,32]")), "I64");
  refused(with(tensor("F32", "[0]", "[0,0]")), "zero");
  refused(with(tensor("F32", "[-4]", "[0,16]")), "negative");
  refused(with(tensor("F32", "[9223372036854775807,2]", "[0,16]")), "too large");
  refused(with(tensor("F32", "[4]", "[0,15]")), "do not hold");
  refused(with(tensor("F32", "[32]", "[0,128]")), "truncated");
  refused(with("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},"
               "\"b\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[8,24]}}"),
          "overlap");
}

// E4M3 with one scale, one a row, or one a block of 128 x 128, as bfloat16 or, to who asks for it, as it is.
TEST(Safetensors, BytesWithScales) {
  constexpr const char* kName = "model.layers.0.mlp.up_proj.weight";
  constexpr int64_t kRows = 130, kCols = 260;  // two blocks by three
  std::vector<uint8_t> bytes(size_t(kRows * kCols));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = uint8_t(i * 37 % 127 | (i % 3 == 0 ? 0x80 : 0));
  auto number = [&](int64_t r, int64_t c) {  // by the definition
    const uint8_t b = bytes[size_t(r * kCols + c)];
    const int exponent = b >> 3 & 15, fraction = b & 7;
    const double x = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    return b & 0x80 ? -x : x;
  };
  auto write = [&](Folder& folder, const std::string& scale, const std::string& shape, size_t count) {
    std::string data(bytes.begin(), bytes.end());
    std::vector<float> scales(count);
    for (size_t i = 0; i < count; ++i) scales[i] = 0.25f * float(i + 1);
    data.append(reinterpret_cast<const char*>(scales.data()), count * 4);
    std::string header = cat("{\"", kName, "\":{\"dtype\":\"F8_E4M3\",\"shape\":[", kRows, ",", kCols,
                             "],\"data_offsets\":[0,", bytes.size(), "]}");
    if (!scale.empty())
      header += cat(",\"", kName, scale, "\":{\"dtype\":\"F32\",\"shape\":", shape, ",\"data_offsets\":[", bytes.size(),
                    ",", data.size(), "]}");
    header += "}";
    const uint64_t n = header.size();
    folder.write("model.safetensors", std::string(reinterpret_cast<const char*>(&n), 8) + header + data);
  };
  struct Case {
    const char *scale, *shape;
    size_t count;
    bool by_row;
  };
  for (const Case& c : {Case{"_scale", "[]", 1, true},
                        {"_scale", "[1]", 1, true},
                        {"_scale", "[130,1]", 130, true},
                        {"_scale_inv", "[2,3]", 6, false}}) {
    SCOPED_TRACE(c.shape);
    Folder folder("bytes");
    write(folder, c.scale, c.shape, c.count);
    auto of = [&](int64_t r, int64_t k) {
      return 0.25 * double(1 + (c.count == 1 ? 0 : c.count == 130 ? r : r / 128 * 3 + k / 128));
    };
    for (bool left : {false, true}) {
      auto weights = open_safetensors(folder.path.string(), false);
      ASSERT_TRUE(weights.ok()) << weights.status().message();
      if (left) (*weights)->leave_bytes();
      auto t = (*weights)->get("blk.0.ffn_up.weight", kRows, kCols);
      ASSERT_TRUE(t.ok()) << t.status().message();
      EXPECT_TRUE((*weights)->unread().empty());
      ASSERT_EQ(t->type, left && c.by_row ? WeightType::f8_e4m3 : WeightType::bf16);
      std::vector<float> row(static_cast<size_t>(kCols));
      for (int64_t r = 0; r < kRows; ++r) {
        dequantize(t->type, t->data + r * t->row_bytes(), kCols, row.data());
        for (int64_t k = 0; k < kCols; ++k) {
          const double by = t->row_scales.empty() ? 1.0 : double(t->row_scales[size_t(r)]),
                       want = number(r, k) * of(r, k);
          ASSERT_NEAR(double(row[size_t(k)]) * by, want, std::fabs(want) / 256) << r << ", " << k;
        }
      }
      (*weights)->release(*t);
    }
  }
  auto refused = [&](const std::string& scale, const std::string& shape, size_t count, const char* word) {
    Folder folder("bytes");
    write(folder, scale, shape, count);
    auto weights = open_safetensors(folder.path.string(), false);
    ASSERT_TRUE(weights.ok());
    auto t = (*weights)->get("blk.0.ffn_up.weight", kRows, kCols);
    ASSERT_FALSE(t.ok()) << word;
    EXPECT_NE(t.status().message().find(word), std::string::npos) << t.status().message();
  };
  refused("", "", 0, "weight_scale is missing");
  refused("_scale", "[2,3]", 6, "1 or 130");
  refused("_scale_inv", "[130]", 130, "6 for blocks");
}

TEST(Safetensors, ShardsStayInTheFolder) {
  Folder folder("shards");
  folder.write("secret.safetensors", "x");
  std::filesystem::create_directories(folder.path / "model");
  std::filesystem::create_symlink(folder.path / "secret.safetensors", folder.path / "model" / "link.safetensors");
  for (const char* name :
       {"../secret.safetensors", "/etc/passwd", "..", "link.safetensors", "missing.safetensors", ""}) {
    folder.write("model/model.safetensors.index.json", std::string("{\"weight_map\":{\"w\":\"") + name + "\"}}");
    EXPECT_FALSE(open_safetensors((folder.path / "model").string(), false).ok()) << name;
  }
}

// Not that of the last tensor by name, which is a norm.
TEST(Load, AFolderIsOfTheTypeThatMostOfItsBytesHave) {
  Folder folder("types");
  folder.write("config.json", R"({"model_type":"llama","hidden_size":32,"intermediate_size":64,"num_hidden_layers":1,)"
                              R"("num_attention_heads":1,"vocab_size":64})");
  const std::string header = R"({"model.embed_tokens.weight":{"dtype":"BF16","shape":[64,32],"data_offsets":[0,4096]},)"
                             R"("model.norm.weight":{"dtype":"F32","shape":[32],"data_offsets":[4096,4224]}})";
  const uint64_t n = header.size();
  folder.write("model.safetensors",
               std::string(reinterpret_cast<const char*>(&n), 8) + header + std::string(4224, 'x'));
  auto opened = open_model(folder.path.string());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_EQ(opened->config.quantization, "BF16");
}

TEST(Load, WhatIsNotThereOrUnknownIsRefusedInWords) {
  EXPECT_EQ(open_model("/nowhere/model.gguf").status().code(), Code::not_found);
  Folder folder("load");
  EXPECT_FALSE(open_model(folder.path.string()).ok());
  folder.write("config.json", "{\"model_type\":\"mamba\"}");
  folder.write("model.safetensors", "");
  auto unknown = open_model(folder.path.string());
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.status().message().find("llama, mistral, gemma3"), std::string::npos) << unknown.status().message();
}

TEST(Load, AWrongShapeNamesTheTensor) {
  Folder folder("shape");
  nlohmann::json c = {{"model_type", "llama"}, {"hidden_size", 64},           {"intermediate_size", 64},
                      {"head_dim", 32},        {"num_attention_heads", 2},    {"num_key_value_heads", 1},
                      {"vocab_size", 40},      {"tie_word_embeddings", true}, {"num_hidden_layers", 1}};
  write_network(folder, c);
  c["intermediate_size"] = 96;
  folder.write("config.json", c.dump());
  RunnerOptions o;
  o.model = folder.path.string();
  auto r = load_runner(o);
  ASSERT_FALSE(r.ok());
  EXPECT_NE(r.status().message().find("gate_proj"), std::string::npos) << r.status().message();
}

}  // namespace
}  // namespace kvasir::model
