// The tokenizer that the Rust library runs; grammars need its handle.
#pragma once

#include "model/text/border.h"
#include "model/text/bounded.h"

namespace kvasir::text {

class RustTokenizer final : public BoundedTokenizer {
 public:
  explicit RustTokenizer(kvt_tokenizer* handle);
  ~RustTokenizer() override { kvt_tokenizer_free(handle_); }
  RustTokenizer(const RustTokenizer&) = delete;
  RustTokenizer& operator=(const RustTokenizer&) = delete;

  int32_t vocab_size() const override { return view_.vocab_size; }
  Result<std::vector<int32_t>> encode_within(const EncodeLimits& limits, std::string_view text, bool add_bos,
                                             bool parse_special) const override;
  bool goes_directly() const override { return view_.goes_directly; }
  Result<std::string> decode(std::span<const int32_t> ids, bool skip_special) const override;
  std::string token_text(int32_t id) const override;
  std::string token_bytes(int32_t id) const override { return std::string(bytes(id)); }
  bool is_special(int32_t id) const override { return known(id) && (view_.flags[id] & 1); }
  int32_t token_id(std::string_view text) const override { return kvt_token_id(handle_, as_str(text)); }
  int32_t bos() const override { return view_.bos; }
  const std::vector<int32_t>& end_of_generation() const override { return end_; }
  const std::string& chat_template() const override { return chat_template_; }
  Result<std::string> to_json() const override;

  const std::string& config_json() const override { return config_json_; }

  // Before anybody else has it.
  Status add_end(int32_t id);
  void keep_config(std::string_view json) { config_json_ = json; }

  const kvt_tokenizer* handle() const { return handle_; }

 private:
  bool known(int32_t id) const { return id >= 0 && id < view_.vocab_size; }
  std::string_view bytes(int32_t id) const;

  kvt_tokenizer* handle_;
  kvt_tokenizer_view view_{};
  std::vector<int32_t> end_;
  std::string chat_template_, config_json_;
};

}  // namespace kvasir::text
