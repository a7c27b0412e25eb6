// The other direction: cases and results as files.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "attention/cases/npy.h"
#include "attention/cases/stored_case.h"
#include "core/cat.h"

namespace kvasir::attention {
namespace {

using kvcache::IndexMode;
using kvcache::QuantKind;
using nlohmann::json;

void put(CaseFiles& files, const std::string& name, std::string descr, std::vector<int64_t> shape, const void* data) {
  NpyArray t{std::move(descr), std::move(shape), {}};
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t n = size_t(t.elements() * npy_item_bytes(t.descr.back()));
  if (n > 0) t.data.assign(bytes, bytes + n);
  files[name + ".npy"] = format_npy(t);
}

std::vector<int64_t> published_shape(const Case& c, int64_t row) {
  const kvcache::CacheView& v = c.view;
  const int revision = c.revision, layout = c.layout;
  const int64_t T = v.max_tokens, L = v.layers, H = v.kv_heads;
  if (revision == 1 && layout == 2) return {L, H, T, 2, row};
  if (revision == 1 && layout == 3) return {2, L, H, T, row};
  if (layout == 0) return {T, L, 2, H, row};
  if (layout == 1) return {L, T, 2, H, row};
  if (layout == 2) return {L, 2, T, H, row};
  return {L, 2, H, T, row};
}

int64_t stored_row(const kvcache::CacheView& v) { return v.dtype == DType::i4 ? v.head_dim / 2 : v.head_dim; }

json attributes_json(const Case& c) {
  const Attributes& a = c.attributes;
  json j = {{"num_heads", a.num_heads},
            {"num_kv_heads", a.num_kv_heads},
            {"head_dim", a.head_dim},
            {"is_alibi", a.is_alibi},
            {"num_layer", c.view.layers},
            {"layer_idx", c.layer},
            {"cache_mode", a.index_mode == IndexMode::offset ? 0 : 1},
            {"cache_layout", c.layout},
            {"page_size", a.page_size},
            {"cache_dtype", dtype_name(c.view.dtype)},
            {"q_scaling", a.q_scaling},
            {"softcap", a.softcap},
            {"window", a.window},
            {"cyclic_capacity", a.cyclic_capacity},
            {"sinks", a.sinks},
            {"streaming_positions", a.streaming_positions},
            {"packed_qkv", a.packed_qkv},
            {"append", a.append},
            {"return_lse", a.return_lse}};
  if (c.op == Op::key_value_cache)
    j["num_repeat"] = c.num_repeat;
  else
    j["is_causal"] = a.is_causal;
  if (c.view.quant == QuantKind::per_tensor) j["k_scale"] = c.view.k_scale, j["v_scale"] = c.view.v_scale;
  if (a.io == DType::f8_e4m3 || a.fp8_query) j["q_scale"] = a.q_scale;
  if (a.fp8_query) j["fp8_query"] = true;
  if (c.view.quant == QuantKind::group) {
    j["quant_bit"] = dtype_bits(c.view.dtype);
    j["quant_group"] = c.view.quant_group;
  }
  if (a.out != DType::f32) j["out_dtype"] = dtype_name(a.out);
  if (a.out == DType::f8_e4m3) j["out_scale"] = a.out_scale;
  if (a.rope.style != RopeStyle::none)
    j["rope"] = {{"style", a.rope.style == RopeStyle::neox ? "neox" : "gptj"},
                 {"rotary_dim", a.rope.rotary_dim},
                 {"inv_freq", a.rope.inv_freq},
                 {"magnitude", a.rope.magnitude}};
  return j;
}

}  // namespace

CaseFiles format_case(const Case& c) {
  const Attributes& a = c.attributes;
  const int64_t B = c.batch(), T = c.tokens(), Hq = a.num_heads, Hkv = a.num_kv_heads, D = a.head_dim;
  const std::string io = descr_of(a.io);
  CaseFiles files;
  json root = {{"op", op_name(c.op)},
               {"revision", c.revision},
               {"io_dtype", a.io == DType::i8 ? "float32" : dtype_name(a.io)},
               {"attributes", attributes_json(c)},
               {"scalars",
                {{"decoding_batches", c.decoding_batches}, {"max_seqlen", c.max_seqlen}, {"max_kvlen", c.max_kvlen}}}};
  const std::string text = root.dump(2) + "\n";
  files["case.json"].assign(text.begin(), text.end());
  put(files, "seqstarts", "<i8", {B + 1}, c.seqstarts.data());
  put(files, "kvstarts", "<i8", {B + 1}, c.kvstarts.data());
  put(files, "start_pos", "<i8", {B}, c.start_pos.data());
  if (a.index_mode == IndexMode::page_table)
    put(files, "cachestarts", "<i8", {B, c.max_pages}, c.cachestarts.data());
  else
    put(files, "cachestarts", "<i8", {int64_t(c.cachestarts.size())}, c.cachestarts.data());
  if (a.packed_qkv) {
    put(files, "qkv", io, {T, (Hq + 2 * Hkv) * D}, c.query.data());
    if (!c.qkv_bias.empty()) put(files, "qkv_bias", io, {(Hq + 2 * Hkv) * D}, c.qkv_bias.data());
  } else {
    if (c.op != Op::key_value_cache) put(files, "query", io, {T, Hq, D}, c.query.data());
    if (a.append) put(files, "current_key", io, {T, Hkv, D}, c.key.data());
    if (a.append) put(files, "current_value", io, {T, Hkv, D}, c.value.data());
  }
  put(files, "cache", descr_of(c.view.dtype), published_shape(c, stored_row(c.view)), c.cache.data());
  if (c.view.quant == QuantKind::group)
    put(files, "scale", descr_of(c.view.scale_dtype), published_shape(c, c.view.head_dim / c.view.quant_group),
        c.scale.data());
  if (c.op == Op::key_value_cache) return files;
  if (!c.attn_mask.empty() && c.mask_head_stride > 0)
    put(files, "attn_mask", io, {Hq, T, c.mask_row_stride}, c.attn_mask.data());
  else if (!c.attn_mask.empty())
    put(files, "attn_mask", io, {T, c.mask_row_stride}, c.attn_mask.data());
  if (!c.sink_logits.empty()) put(files, "sink_logits", "<f4", {Hq}, c.sink_logits.data());
  if (!a.alibi_slopes.empty()) put(files, "alibi_slopes", "<f4", {Hq}, a.alibi_slopes.data());
  if (!a.relative_bias.empty())
    put(files, "relative_bias", "<f4", {Hq, int64_t(a.relative_bias.size()) / Hq}, a.relative_bias.data());
  if (!c.indirection.empty())
    put(files, "cache_indirection", "<i4", {B / c.beam_width, c.beam_width, c.max_kvlen}, c.indirection.data());
  return files;
}

CaseFiles format_output(const Case& c, const CaseOutput& out) {
  const Attributes& a = c.attributes;
  CaseFiles files;
  const std::string type = descr_of(a.out);
  if (c.op == Op::key_value_cache) {
    const std::vector<int64_t> shape = {c.kvstarts.back(), int64_t(a.num_kv_heads) * c.num_repeat, a.head_dim};
    put(files, "key", type, shape, out.key.data());
    put(files, "value", type, shape, out.value.data());
  } else {
    put(files, "attn_output", type, {c.tokens(), a.num_heads, a.head_dim}, out.output.data());
    if (a.return_lse) put(files, "lse", "<f4", {c.tokens(), a.num_heads}, out.lse.data());
  }
  if (c.op == Op::attention) return files;  // it has no cache
  put(files, "cache", descr_of(c.view.dtype), published_shape(c, stored_row(c.view)), c.cache.data());
  if (c.view.quant == QuantKind::group)
    put(files, "scale", descr_of(c.view.scale_dtype), published_shape(c, c.view.head_dim / c.view.quant_group),
        c.scale.data());
  return files;
}

namespace {

// A pipe would be waited for, and a device read for ever.
Status read_regular(const std::string& path, Bytes* bytes) {
  struct stat what;
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return invalid_argument(cat("cannot read ", path, ": ", std::strerror(errno)));
  FILE* f = fdopen(file, "rb");
  if (!f || fstat(file, &what) != 0 || !S_ISREG(what.st_mode)) {
    f ? std::fclose(f) : close(file);
    return invalid_argument(cat(path, " is a folder, a pipe or a device; it must be a regular file"));
  }
  bytes->reserve(size_t(what.st_size));
  uint8_t buffer[1 << 16];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, f)) > 0;) bytes->insert(bytes->end(), buffer, buffer + n);
  const bool failed = std::ferror(f);
  std::fclose(f);
  return failed ? unavailable(cat("cannot read ", path, ": ", std::strerror(errno))) : Status();
}

// Said before any work: what is written in the end can be written there.
Status check_out(const std::string& out) {
  struct stat what;
  const bool there = lstat(out.c_str(), &what) == 0;
  if (there && (stat(out.c_str(), &what) != 0 || !S_ISDIR(what.st_mode)))
    return invalid_argument(cat("--out ", out, " is there and is no folder")).with_field("out");
  std::filesystem::path parent = std::filesystem::path(out).lexically_normal();
  if (!parent.has_filename()) parent = parent.parent_path();  // it ended in a slash
  parent = there ? parent : parent.parent_path();
  if (parent.empty()) parent = ".";
  if (access(parent.c_str(), W_OK) != 0)
    return invalid_argument(
               cat("--out ", out, ": cannot write to the folder ", parent.string(), ": ", std::strerror(errno)))
        .with_field("out");
  return {};
}

}  // namespace

Result<CaseFiles> read_folder(const std::string& folder) {
  CaseFiles files;
  DIR* dir = opendir(folder.c_str());
  if (!dir) return not_found(cat("cannot read the folder ", folder, ": ", std::strerror(errno)));
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name, path = folder + "/" + name;
    if (name != "case.json" && !name.ends_with(".npy")) continue;
    Status read = read_regular(path, &files[name]);
    if (!read.ok()) {
      closedir(dir);
      return std::move(read).with_field(name);
    }
  }
  closedir(dir);
  return files;
}

Status write_folder(const std::string& folder, const CaseFiles& files) {
  if (mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST)
    return unavailable(cat("cannot make the folder ", folder, ": ", std::strerror(errno)));
  for (const auto& [name, bytes] : files) {
    const std::string path = folder + "/" + name;
    FILE* f = std::fopen(path.c_str(), "wb");
    const bool written = f && std::fwrite(bytes.data(), 1, bytes.size(), f) == bytes.size();
    if ((f && std::fclose(f) != 0) || !written)
      return unavailable(cat("cannot write ", path, ": ", std::strerror(errno)));
  }
  return {};
}

Status run_folder(const std::string& folder, const Backend& backend, const DeviceContext& context,
                  const std::string& out) {
  KVASIR_TRY(check_out(out));
  KVASIR_ASSIGN(CaseFiles files, read_folder(folder));
  KVASIR_ASSIGN(Case c, parse_case(files));
  files.clear();
  CaseOutput output;
  KVASIR_TRY(run_case(c, backend, context, &output));
  return write_folder(out, format_output(c, output));
}

}  // namespace kvasir::attention
