// Stored cases that break the contract, each with words of the message that must refuse it.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "attention/cases/npy.h"
#include "attention/cases/stored_case.h"
#include "tests/attention/testing.h"

namespace kvasir::attention::testing {

using nlohmann::json;

inline void edit(CaseFiles& f, const char* section, const char* key, json value) {
  json root = json::parse(f["case.json"].begin(), f["case.json"].end());
  if (section)
    root[section][key] = value;
  else
    root[key] = value;
  const std::string text = root.dump();
  f["case.json"].assign(text.begin(), text.end());
}
inline void edit_text(CaseFiles& f, const char* file, const std::string& from, const std::string& to) {
  std::string text(f[file].begin(), f[file].end());
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  f[file].assign(text.begin(), text.end());
}
// Element `index` of an int64 array; negative: of row -index of a table.
inline void set_int64(CaseFiles& f, const char* file, int64_t index, int64_t value) {
  NpyArray t = parse_npy(file, f[file].data(), f[file].size()).value();
  if (index < 0) index = -index * t.shape[1];
  std::memcpy(t.data.data() + index * 8, &value, 8);
  f[file] = format_npy(t);
}

// A folder of this test alone, gone afterwards.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "kvasir_op_XXXXXX").string();
    if (mkdtemp(name.data())) path_ = name;
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  Scratch(const Scratch&) = delete;
  std::string in() const { return path_ / "case"; }
  std::string out() const { return path_ / "out"; }
  // The case as a folder, and no result.
  void put(const CaseFiles& files) const {
    std::filesystem::remove_all(in());
    std::filesystem::remove_all(out());
    Status written = write_folder(in(), files);
    ASSERT_TRUE(written.ok()) << written.to_string();
  }

 private:
  std::filesystem::path path_;
};

struct Refusal {
  const char* says;
  void (*breaks)(CaseFiles&);
};

// Sequences: 20 old and 1 new token, 7 and 3, 0 and 9; pages of 16 in rows of 2; 13 new tokens.
inline Case sound_case() {
  CaseShape s = small();
  s.sequences = {{20, 1}, {7, 3}, {0, 9}};
  s.decoding_batches = 1;
  s.layout = 0;
  s.cache.layers = 1;
  return make_case(s);
}

// What each entry does to it.
inline const Refusal kRefusals[] = {
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
     [](CaseFiles& f) { edit(f, "attributes", "num_kv_heads", 3); }},
    {"head_dim is 0; it must be from 1 to 576", [](CaseFiles& f) { edit(f, "attributes", "head_dim", 0); }},
    {"query has shape (13, 4, 32); it must have (13, 8, 32)",
     [](CaseFiles& f) { edit(f, "attributes", "num_heads", 8); }},
    {"page_size is 0; it must be from 1 to 65536", [](CaseFiles& f) { edit(f, "attributes", "page_size", 0); }},
    {"out_dtype int8 is for KeyValueCache", [](CaseFiles& f) { edit(f, "attributes", "out_dtype", "int8"); }},
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
    {"max_kvlen is -1; it must be from 0 to 2147483647", [](CaseFiles& f) { edit(f, "scalars", "max_kvlen", -1); }},
    {"num_kv_heads is 2; it must be at least 1 and divide num_heads, which is 3",
     [](CaseFiles& f) { edit(f, "attributes", "num_heads", 3); }},
    {"'head_dim' stands twice",
     [](CaseFiles& f) { edit_text(f, "case.json", "\"head_dim\"", "\"head_dim\": 32, \"head_dim\""); }},
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
    {"num_repeat means nothing in this case", [](CaseFiles& f) { edit(f, "attributes", "num_repeat", 2); }},
    {"k_scale means nothing in this case", [](CaseFiles& f) { edit(f, "attributes", "k_scale", 0.5); }},
    {"out_scale means nothing in this case", [](CaseFiles& f) { edit(f, "attributes", "out_scale", 0.5); }},
    {"with quant_bit 4 it must be int4",
     [](CaseFiles& f) { edit(f, "attributes", "quant_bit", 4), edit(f, "attributes", "cache_dtype", "int8"); }},
    {"is_causal means nothing in this case: KeyValueCache",
     [](CaseFiles& f) { edit(f, nullptr, "op", "KeyValueCache"); }},
    {"cache_mode means nothing in this case: MultiHeadAttention",
     [](CaseFiles& f) { edit(f, nullptr, "op", "MultiHeadAttention"); }},
    {"rope has both inv_freq and the rule",
     [](CaseFiles& f) {
       edit(f, "attributes", "rope", {{"rotary_dim", 4}, {"inv_freq", {1.0, 0.1}}, {"base", 500.0}});
     }},
    {"rope.scaling has 'beta_fast', which is not in the contract",
     [](CaseFiles& f) {
       edit(f, "attributes", "rope",
            {{"rotary_dim", 4}, {"scaling", {{"type", "linear"}, {"factor", 2.0}, {"beta_fast", 3.0}}}});
     }},
    {"alibi_slopes.npy is given and is_alibi is false",
     [](CaseFiles& f) {
       f["alibi_slopes.npy"] = format_npy({"<f4", {4}, Bytes(16)});
     }},
    {"relative_bias is <f4 of (4, 2); it must be float32 of (4 heads, 2 * reach + 1 distances)",
     [](CaseFiles& f) {
       f["relative_bias.npy"] = format_npy({"<f4", {4, 2}, Bytes(32)});
     }},
    {"attn_mask is <f4 of (13, 3)",
     [](CaseFiles& f) {
       f["attn_mask.npy"] = format_npy({"<f4", {13, 3}, Bytes(156)});
     }},
};

}  // namespace kvasir::attention::testing
