// What a broken or hostile file says is refused with the file, the tensor and the place.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "core/cat.h"
#include "core/dtype.h"
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
      {"type number", {.type = 59}},  // those of safetensors alone
      {"type number", {.type = 60}},
      {"type number", {.type = 61}},
      {"type number", {.type = 62}},
      {"type number", {.type = 63}},
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
  refused(with(tensor("I16", "[4]", "[0,8]")), "I16");
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
    int64_t scales;  // of a row
  };
  for (const Case& c : {Case{"_scale", "[]", 1, 1},
                        {"_scale", "[1]", 1, 1},
                        {"_scale", "[130,1]", 130, 1},
                        {"_scale_inv", "[2,3]", 6, 3}}) {
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
      ASSERT_EQ(t->type, left ? WeightType::f8_e4m3 : WeightType::bf16);
      const int64_t scales = t->scales_a_row();
      ASSERT_EQ(scales, left ? c.scales : 0);
      std::vector<float> row(static_cast<size_t>(kCols));
      for (int64_t r = 0; r < kRows; ++r) {
        dequantize(t->type, t->data + r * t->row_bytes(), kCols, row.data());
        for (int64_t k = 0; k < kCols; ++k) {
          const double by = scales == 0 ? 1.0 : double(t->row_scales[size_t(r * scales + (scales > 1 ? k / 128 : 0))]),
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

struct UpProjection {  // model.layers.0.mlp.up_proj.*
  std::string header = "{", data;
  void add(const std::string& name, const char* dtype, std::vector<int64_t> shape, const void* bytes, size_t size) {
    header += cat(header.size() > 1 ? "," : "", "\"model.layers.0.mlp.up_proj.", name, "\":{\"dtype\":\"", dtype,
                  "\",\"shape\":[", shape[0]);
    for (size_t i = 1; i < shape.size(); ++i) header += cat(",", shape[i]);
    header += cat("],\"data_offsets\":[", data.size(), ",", data.size() + size, "]}");
    data.append(static_cast<const char*>(bytes), size);
  }
  // value(row, col) of 4 bits, eight along the rows or the columns in a word, in this order.
  template <class Value>
  void add_words(const std::string& name, int64_t rows, int64_t cols, bool along_cols, const Value& value,
                 const std::array<int, 8>& order = {0, 1, 2, 3, 4, 5, 6, 7}) {
    const int64_t high = along_cols ? rows : rows / 8, wide = along_cols ? cols / 8 : cols;
    std::vector<uint32_t> words(size_t(high * wide));
    for (int64_t r = 0; r < high; ++r)
      for (int64_t c = 0; c < wide; ++c)
        for (int i = 0; i < 8; ++i)
          words[size_t(r * wide + c)] |=
              (along_cols ? value(r, 8 * c + order[size_t(i)]) : value(8 * r + order[size_t(i)], c)) << 4 * i;
    add(name, "I32", {high, wide}, words.data(), words.size() * 4);
  }
  void write(const Folder& folder) const {
    const uint64_t n = header.size() + 1;
    folder.write("model.safetensors", std::string(reinterpret_cast<const char*>(&n), 8) + header + "}" + data);
  }
};

// GPTQ of 8 bits: as Q8_0 where zeros are in the middle, else as float16.
TEST(Safetensors, EightBits) {
  constexpr int64_t kRows = 48, kCols = 96, kGroups = 3;
  for (const bool middle : {true, false}) {
    auto q = [](int64_t r, int64_t c) { return uint32_t(r * 7 + c * 5 + r * c) & 255; };
    auto zero = [&](int64_t r, int64_t g) { return middle ? 128u : uint32_t(100 + (r + g) % 50); };
    auto scale = [](int64_t r, int64_t g) { return std::ldexp(1.0, -int(5 + (r + g) % 4)); };
    std::vector<uint32_t> words(size_t(kCols / 4 * kRows)), zeros(size_t(kGroups * kRows / 4));
    for (int64_t c = 0; c < kCols; ++c)
      for (int64_t r = 0; r < kRows; ++r) words[size_t(c / 4 * kRows + r)] |= q(r, c) << 8 * (c % 4);
    std::vector<uint16_t> scales;
    for (int64_t g = 0; g < kGroups; ++g)
      for (int64_t r = 0; r < kRows; ++r) {
        zeros[size_t(g * (kRows / 4) + r / 4)] |= (zero(r, g) - 1) << 8 * (r % 4);
        scales.push_back(f32_to_f16(float(scale(r, g))));
      }
    UpProjection t;
    t.add("qweight", "I32", {kCols / 4, kRows}, words.data(), words.size() * 4);
    t.add("qzeros", "I32", {kGroups, kRows / 4}, zeros.data(), zeros.size() * 4);
    t.add("scales", "F16", {kGroups, kRows}, scales.data(), scales.size() * 2);
    Folder folder("eight");
    t.write(folder);
    auto weights = open_safetensors(folder.path.string(), false, {}, 1);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ((*weights)->parameters(), kRows * kCols + int64_t(scales.size()));
    auto w = (*weights)->get("blk.0.ffn_up.weight", kRows, kCols);
    ASSERT_TRUE(w.ok()) << w.status().message();
    EXPECT_TRUE((*weights)->unread().empty());
    EXPECT_EQ(w->type, middle ? WeightType::q8_0 : WeightType::f16);
    std::vector<float> row(static_cast<size_t>(kCols));
    for (int64_t r = 0; r < kRows; ++r) {
      dequantize(w->type, w->data + r * w->row_bytes(), kCols, row.data());
      for (int64_t c = 0; c < kCols; ++c) {
        const int64_t g = c / (kCols / kGroups);
        ASSERT_EQ(double(row[size_t(c)]), (double(q(r, c)) - zero(r, g)) * scale(r, g)) << r << " " << c;
      }
    }
  }
}

// NVFP4 as compressed-tensors and as modelopt write it; and what does not fit.
TEST(Safetensors, Nvfp4) {
  constexpr int64_t kRows = 6, kCols = 64;
  constexpr double kE2m1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  auto q = [](int64_t r, int64_t c) { return int(r * 7 + c * 5 + r * c) & 15; };
  auto scale = [](int64_t r, int64_t g) { return uint8_t(0x30 + 8 * ((r + g) % 4) + (r + 2 * g) % 8); };  // E4M3
  for (const auto& [packed, left] : {std::pair{true, false}, {false, false}, {true, true}, {false, true}}) {
    SCOPED_TRACE(cat(packed, left));
    std::string bytes(size_t(kRows * kCols / 2), '\0'), scales;
    for (int64_t i = 0; i < kRows * kCols; ++i) bytes[size_t(i / 2)] |= char(q(i / kCols, i % kCols) << i % 2 * 4);
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t g = 0; g < kCols / 16; ++g) scales.push_back(char(scale(r, g)));
    const float whole = packed ? 64 : .015625f, input = 3;
    auto make = [&, packed = packed](const char* gone, int64_t groups) {
      UpProjection t;
      t.add(packed ? "weight_packed" : "weight", "U8", {kRows, kCols / 2}, bytes.data(), bytes.size());
      if (std::string_view(gone) != "weight_scale")
        t.add("weight_scale", "F8_E4M3", {kRows, groups}, scales.data(), size_t(kRows * groups));
      const char* name = packed ? "weight_global_scale" : "weight_scale_2";
      if (std::string_view(gone) != name) t.add(name, "F32", {1}, &whole, 4);
      t.add(packed ? "input_global_scale" : "input_scale", "F32", {1}, &input, 4);
      return t;
    };
    Folder folder("nvfp4");
    make("", kCols / 16).write(folder);
    auto weights = open_safetensors(folder.path.string(), false);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    if (left) (*weights)->leave_bytes();
    auto w = (*weights)->get("blk.0.ffn_up.weight", kRows, kCols);
    ASSERT_TRUE(w.ok()) << w.status().message();
    EXPECT_EQ(w->type, left ? WeightType::nvfp4 : WeightType::f16);
    EXPECT_TRUE((*weights)->unread().empty());
    std::vector<float> row(static_cast<size_t>(kCols));
    for (int64_t r = 0; r < kRows; ++r) {
      dequantize(w->type, w->data + r * w->row_bytes(), kCols, row.data());
      for (int64_t c = 0; c < kCols; ++c) {
        const uint8_t s = scale(r, c / 16);
        const double of = std::ldexp(1 + (s & 7) / 8.0, (s >> 3) - 7);
        ASSERT_EQ(double(row[size_t(c)]), kE2m1[q(r, c) & 7] * (q(r, c) < 8 ? 1 : -1) * of / 64) << r << " " << c;
      }
    }
    for (const auto& [gone, groups, wanted, says] :
         {std::tuple{"weight_scale", kCols / 16, kCols, "weight_scale is no F8_E4M3"},
          {packed ? "weight_global_scale" : "weight_scale_2", kCols / 16, kCols, "is no F32"},
          {"", kCols / 32, kCols, "weight_scale is no F8_E4M3 of 6 x 4"},
          {"", kCols / 16, 2 * kCols, "does not hold 6 x 128"}}) {
      Folder bad("nvfp4");
      make(gone, groups).write(bad);
      auto broken = open_safetensors(bad.path.string(), false);
      ASSERT_TRUE(broken.ok()) << broken.status().message();
      auto t = (*broken)->get("blk.0.ffn_up.weight", kRows, wanted);
      ASSERT_FALSE(t.ok()) << says;
      EXPECT_NE(t.status().message().find(says), std::string::npos) << t.status().message();
    }
  }
}

// Weights of 4 bits as each maker lays them out, by these definitions: (q - zero) * scale of the input's group.
TEST(Safetensors, FourBits) {
  constexpr int64_t kRows = 48, kCols = 96;
  auto q = [](int64_t r, int64_t c) { return uint32_t(r * 7 + c * 5 + r * c) & 15; };
  auto zero = [](int64_t r, int64_t g) { return uint32_t(1 + (r + 3 * g) % 15); };
  auto scale = [](int64_t r, int64_t g) { return std::ldexp(1.0, -int(5 + (r + g) % 4)); };
  for (const std::string form : {"awq", "gptq", "gptq_v2", "gptq of mixed groups", "packed", "packed with zeros"}) {
    SCOPED_TRACE(form);
    const bool mixed = form == "gptq of mixed groups", packed = form.starts_with("packed"),
               gptq = form.starts_with("gptq");
    const int64_t groups = 3;
    auto group = [&](int64_t c) { return mixed ? c * 7 % groups : c / (kCols / groups); };
    auto zero_of = [&](int64_t r, int64_t g) { return form == "packed" ? 8 : zero(r, g); };
    const uint32_t less = gptq && form != "gptq_v2" ? 1 : 0;
    UpProjection t;
    std::vector<uint16_t> scales;
    if (packed) {
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t g = 0; g < groups; ++g) scales.push_back(f32_to_f16(float(scale(r, g))));
      t.add_words("weight_packed", kRows, kCols, true, q);
      t.add("weight_scale", "F16", {kRows, groups}, scales.data(), scales.size() * 2);
      const int64_t shape[] = {kRows, kCols};
      t.add("weight_shape", "I64", {2}, shape, sizeof shape);
      if (form != "packed") t.add_words("weight_zero_point", kRows, groups, false, zero);
    } else {
      for (int64_t g = 0; g < groups; ++g)
        for (int64_t r = 0; r < kRows; ++r) scales.push_back(f32_to_f16(float(scale(r, g))));
      const std::array<int, 8> awq{0, 2, 4, 6, 1, 3, 5, 7}, plain{0, 1, 2, 3, 4, 5, 6, 7};
      t.add_words(
          "qweight", kCols, kRows, !gptq, [&](int64_t c, int64_t r) { return q(r, c); }, gptq ? plain : awq);
      t.add_words(
          "qzeros", groups, kRows, true, [&](int64_t g, int64_t r) { return zero(r, g) - less; }, gptq ? plain : awq);
      t.add("scales", "F16", {groups, kRows}, scales.data(), scales.size() * 2);
      std::vector<int32_t> of;
      for (int64_t c = 0; c < kCols; ++c) of.push_back(int32_t(group(c)));
      if (gptq) t.add("g_idx", "I32", {kCols}, of.data(), of.size() * 4);
    }
    Folder folder("four");
    t.write(folder);
    auto weights = open_safetensors(folder.path.string(), false, {}, int32_t(less));
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ((*weights)->has("blk.0.ffn_up.weight"), true);
    auto w = (*weights)->get("blk.0.ffn_up.weight", kRows, kCols);
    ASSERT_TRUE(w.ok()) << w.status().message();
    EXPECT_TRUE((*weights)->unread().empty());
    EXPECT_EQ(w->type, mixed ? WeightType::f16 : WeightType::int4);
    EXPECT_EQ((*weights)->parameters(), kRows * kCols + int64_t(scales.size()));
    std::vector<float> row(static_cast<size_t>(kCols));
    for (int64_t r = 0; r < kRows; ++r) {
      dequantize(w->type, w->data + r * w->row_bytes(), kCols, row.data());
      for (int64_t c = 0; c < kCols; ++c)
        ASSERT_EQ(double(row[size_t(c)]), (double(q(r, c)) - zero_of(r, group(c))) * scale(r, group(c)))
            << r << " " << c;
    }
    (*weights)->release(*w);
    EXPECT_FALSE((*weights)->get("blk.0.ffn_up.weight", kRows, 2 * kCols).ok());
    EXPECT_FALSE((*weights)->get("blk.0.ffn_up.weight", kRows - 4, kCols).ok());
    EXPECT_FALSE((*weights)->get("blk.0.ffn_up.weight", 1, kCols).ok());
  }
  auto refused = [](const UpProjection& t, const char* word) {
    Folder folder("four");
    t.write(folder);
    auto weights = open_safetensors(folder.path.string(), false);
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    auto w = (*weights)->get("blk.0.ffn_up.weight", kRows, kCols);
    ASSERT_FALSE(w.ok()) << word;
    EXPECT_NE(w.status().message().find(word), std::string::npos) << w.status().message();
  };
  const std::vector<uint16_t> ones(3 * 48, f32_to_f16(1));
  const std::vector<int32_t> wrong(kCols, 3);
  UpProjection bare;
  bare.add_words("qweight", kCols, kRows, false, [&](int64_t c, int64_t r) { return q(r, c); });
  refused(bare, "up_proj.scales is missing");
  UpProjection uneven = bare, strange = bare, integers;
  uneven.add("scales", "F16", {5, 28}, ones.data(), 5 * 28 * 2);
  refused(uneven, "5 groups of 96 inputs");
  strange.add("scales", "F16", {3, 48}, ones.data(), ones.size() * 2);
  strange.add("g_idx", "I32", {kCols}, wrong.data(), wrong.size() * 4);
  refused(strange, "input 0 is of group 3 of 3");
  const std::vector<int64_t> numbers(size_t(kRows * kCols));
  integers.add("weight", "I64", {kRows, kCols}, numbers.data(), numbers.size() * 8);
  refused(integers, "of integers, which only packed weights of 4 bits may be");
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
