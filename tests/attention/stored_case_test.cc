// Stored cases: through files and back, and what `kvasir op` refuses.
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "attention/cases/npy.h"
#include "attention/cases/stored_case.h"
#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;
using nlohmann::json;

TEST(StoredCase, RandomCasesComeBackTheSame) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Case c = random_case(seed);
    // No revision of the operators pairs these; the code can, a stored case cannot say it.
    const kvcache::IndexMode mode = c.attributes.index_mode;
    if (mode == (c.revision == 1 ? kvcache::IndexMode::page_table : kvcache::IndexMode::token_table)) continue;
    if (c.attributes.out != DType::f8_e4m3) c.attributes.out = DType::f32;
    Result<Case> back = parse_case(format_case(c));
    ASSERT_TRUE(back.ok()) << back.status().to_string() << "\n" << describe(c);
    Outcome x = run_on("cpu", c), y = run_on("cpu", *back);
    ASSERT_TRUE(y.status.ok()) << y.status.to_string();
    EXPECT_EQ(format_output(x.after, x.out), format_output(y.after, y.out)) << describe(c);
  }
}

TEST(StoredCase, MultiHeadAttentionAloneTakesPackedKeys) {
  CaseShape s = small();
  s.sequences = {{0, 4}, {0, 7}};
  s.attributes.index_mode = kvcache::IndexMode::offset;
  Case c = make_case(s);
  CaseFiles files = format_case(c);
  json root = json::parse(files["case.json"].begin(), files["case.json"].end());
  root["op"] = "dynamic_batching.MultiHeadAttention";
  const std::string text = root.dump();
  files["case.json"].assign(text.begin(), text.end());
  for (const char* gone : {"cache.npy", "cachestarts.npy", "start_pos.npy"}) files.erase(gone);
  Result<Case> alone = parse_case(files);
  ASSERT_TRUE(alone.ok()) << alone.status().to_string();
  Outcome x = run_on("cpu", c), y = run_on("cpu", *alone);
  ASSERT_TRUE(y.status.ok()) << y.status.to_string();
  EXPECT_TRUE(same_bytes(x.out, y.out));
  EXPECT_EQ(format_output(y.after, y.out).count("cache.npy"), 0u);
}

// ---- refusals -----------------------------------------------------------------------------------------

void edit(CaseFiles& f, const char* section, const char* key, json value) {
  json root = json::parse(f["case.json"].begin(), f["case.json"].end());
  if (section)
    root[section][key] = value;
  else
    root[key] = value;
  const std::string text = root.dump();
  f["case.json"].assign(text.begin(), text.end());
}
void edit_text(CaseFiles& f, const char* file, const std::string& from, const std::string& to) {
  std::string text(f[file].begin(), f[file].end());
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  f[file].assign(text.begin(), text.end());
}
// Element `index` of an int64 array; negative: of row -index of a table.
void set_int64(CaseFiles& f, const char* file, int64_t index, int64_t value) {
  NpyArray t = parse_npy(file, f[file].data(), f[file].size()).value();
  if (index < 0) index = -index * t.shape[1];
  std::memcpy(t.data.data() + index * 8, &value, 8);
  f[file] = format_npy(t);
}

struct Refusal {
  const char* says;
  void (*breaks)(CaseFiles&);
};

// Sequences: 20 old and 1 new token, 7 and 3, 0 and 9; pages of 16 in rows of 2; 13 new tokens.
const Refusal kRefusals[] = {
    {"has no case.json", [](CaseFiles& f) { f.erase("case.json"); }},
    {"case.json: ", [](CaseFiles& f) { edit_text(f, "case.json", "{", "[{"); }},
    {"invalid literal", [](CaseFiles& f) { edit_text(f, "case.json", "\"q_scaling\": 1.0", "\"q_scaling\": NaN"); }},
    {"softcap is -1", [](CaseFiles& f) { edit(f, "attributes", "softcap", -1); }},
    {"op is 'Conv'", [](CaseFiles& f) { edit(f, nullptr, "op", "Conv"); }},
    {"revision is 3; it must be 1 or 2", [](CaseFiles& f) { edit(f, nullptr, "revision", 3); }},
    {"io_dtype is 'float80'", [](CaseFiles& f) { edit(f, nullptr, "io_dtype", "float80"); }},
    {"'headdim', which is not in the contract", [](CaseFiles& f) { edit(f, "attributes", "headdim", 64); }},
    {"is_causal is 1; it must be true or false", [](CaseFiles& f) { edit(f, "attributes", "is_causal", 1); }},
    {"num_kv_heads is 3; it must be at least 1 and divide num_heads",
     [](CaseFiles& f) {
       edit(f, "attributes", "num_kv_heads", 3);
       for (const char* name : {"current_key.npy", "current_value.npy"})
         edit_text(f, name, "(13, 2, 32)", "(13, 3, 32)");
       for (const char* name : {"current_key.npy", "current_value.npy"}) f[name].resize(f[name].size() + 13 * 32 * 4);
       edit_text(f, "cache.npy", ", 2, 2, ", ", 2, 3, ");
       f["cache.npy"].resize(128 + (f["cache.npy"].size() - 128) / 2 * 3);
     }},
    {"head_dim is 0; it must be from 1 to 512", [](CaseFiles& f) { edit(f, "attributes", "head_dim", 0); }},
    {"query has shape (13, 4, 32); it must have (13, 8, 32)",
     [](CaseFiles& f) { edit(f, "attributes", "num_heads", 8); }},
    {"page_size is 24; it must be a power of two", [](CaseFiles& f) { edit(f, "attributes", "page_size", 24); }},
    {"layer_idx is 5; it must be from 0 to num_layer-1", [](CaseFiles& f) { edit(f, "attributes", "layer_idx", 5); }},
    {"cache_layout is 7", [](CaseFiles& f) { edit(f, "attributes", "cache_layout", 7); }},
    {"cache has shape", [](CaseFiles& f) { edit(f, "attributes", "num_layer", 4); }},
    {"cache is <f4; it must be <f2", [](CaseFiles& f) { edit(f, "attributes", "cache_dtype", "float16"); }},
    {"quant_bit is 3", [](CaseFiles& f) { edit(f, "attributes", "quant_bit", 3); }},
    {"scale.npy is absent",
     [](CaseFiles& f) {
       edit(f, "attributes", "quant_bit", 8), edit(f, "attributes", "cache_dtype", "int8");
       NpyArray t = parse_npy("", f["cache.npy"].data(), f["cache.npy"].size()).value();
       t.descr = "|i1", t.data.resize(t.data.size() / 4);
       f["cache.npy"] = format_npy(t);
     }},
    {"decoding_batches is 9; it must be from 0 to 3", [](CaseFiles& f) { edit(f, "scalars", "decoding_batches", 9); }},
    {"max_seqlen is 2; the longest sequence has 9 tokens", [](CaseFiles& f) { edit(f, "scalars", "max_seqlen", 2); }},
    {"neither may be negative", [](CaseFiles& f) { edit(f, "scalars", "max_kvlen", -4); }},
    {"sequence 1 would have a negative length", [](CaseFiles& f) { set_int64(f, "seqstarts.npy", 2, 0); }},
    {"with append it must be start_pos + seqlen", [](CaseFiles& f) { set_int64(f, "start_pos.npy", 1, 8); }},
    {"start_pos[0] is -20", [](CaseFiles& f) { set_int64(f, "start_pos.npy", 0, -20); }},
    {"as the cache holds", [](CaseFiles& f) { set_int64(f, "cachestarts.npy", 0, int64_t(1) << 40); }},
    {"cachestarts[2, 0] is -16", [](CaseFiles& f) { set_int64(f, "cachestarts.npy", -2, -16); }},
    {"both write token slot",
     [](CaseFiles& f) {
       NpyArray t = parse_npy("", f["cachestarts.npy"].data(), f["cachestarts.npy"].size()).value();
       const size_t row = size_t(t.shape[1]) * 8;
       std::memcpy(t.data.data() + 2 * row, t.data.data() + row, 8);  // sequence 2's page is sequence 1's
       f["cachestarts.npy"] = format_npy(t);
     }},
    {"query.npy has ", [](CaseFiles& f) { f["query.npy"].resize(f["query.npy"].size() - 100); }},
    {"ends inside its npy header", [](CaseFiles& f) { f["query.npy"].resize(40); }},
    {"is not an npy file", [](CaseFiles& f) { f["query.npy"][0] = 'P'; }},
    {"its header says (14, 4, 32) of <f4",
     [](CaseFiles& f) { edit_text(f, "query.npy", "(13, 4, 32)", "(14, 4, 32)"); }},
    {"more than 2^63", [](CaseFiles& f) { edit_text(f, "seqstarts.npy", "(4,)", "(9223372036854775807,)"); }},
    {"is in Fortran order", [](CaseFiles& f) { edit_text(f, "query.npy", "False", "True"); }},
    {"holds '>f4'", [](CaseFiles& f) { edit_text(f, "query.npy", "<f4", ">f4"); }},
    {"current_key.npy is absent", [](CaseFiles& f) { f.erase("current_key.npy"); }},
    {"keys.npy is no tensor that this case can have", [](CaseFiles& f) { f["keys.npy"] = f["query.npy"]; }},
    {"cache_indirection is <i4",
     [](CaseFiles& f) {
       f["cache_indirection.npy"] = format_npy({"<i4", {3}, Bytes(12)});
     }},
    {"sink_logits[1] is NaN",
     [](CaseFiles& f) {
       const float values[] = {0, NAN, 0, 0};
       NpyArray t{"<f4", {4}, Bytes(16)};
       std::memcpy(t.data.data(), values, 16);
       f["sink_logits.npy"] = format_npy(t);
     }},
    {"attn_mask is <f4 of (13, 3)",
     [](CaseFiles& f) {
       f["attn_mask.npy"] = format_npy({"<f4", {13, 3}, Bytes(156)});
     }},
};

TEST(OpRefuses, EachBrokenCaseByNameAndWritesNothing) {
  static_assert(std::size(kRefusals) >= 30);
  CaseShape s = small();
  s.sequences = {{20, 1}, {7, 3}, {0, 9}};
  s.decoding_batches = 1;
  s.layout = 0;
  s.cache.layers = 1;
  Case c = make_case(s);
  char base[] = "/tmp/kvasir_op_XXXXXX";
  ASSERT_NE(mkdtemp(base), nullptr);
  const std::string in = std::string(base) + "/case", out = std::string(base) + "/out";
  auto clear = [&] {
    if (Result<CaseFiles> old = read_folder(in); old.ok())
      for (const auto& [name, bytes] : *old) unlink((in + "/" + name).c_str());
  };
  for (const Refusal& r : kRefusals) {
    CaseFiles files = format_case(c);
    r.breaks(files);
    clear();
    ASSERT_TRUE(write_folder(in, files).ok());
    Status status = run_folder(in, **find_backend("cpu"), {}, out);
    EXPECT_EQ(status.code(), Code::invalid_argument) << r.says;
    EXPECT_NE(status.message().find(r.says), std::string::npos) << status.message() << "\n  wanted: " << r.says;
    struct stat unused;
    EXPECT_NE(stat(out.c_str(), &unused), 0) << "nothing may be written: " << r.says;
  }
  clear();
  ASSERT_TRUE(write_folder(in, format_case(c)).ok());
  Status good = run_folder(in, **find_backend("cpu"), {}, out);
  EXPECT_TRUE(good.ok()) << good.to_string();
  EXPECT_EQ(read_folder(out)->size(), 3u) << "attn_output, lse, cache";
  for (const std::string& folder : {in, out}) {
    const CaseFiles written = read_folder(folder).value();
    for (const auto& [name, bytes] : written) unlink((folder + "/" + name).c_str());
    rmdir(folder.c_str());
  }
  rmdir(base);
}

}  // namespace
}  // namespace kvasir::attention
