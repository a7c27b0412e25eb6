#include "model/text/border.h"
#include "model/text/text.h"

namespace kvasir::text {
namespace {

class RustTemplate final : public ChatTemplate {
 public:
  RustTemplate(kvt_template* handle, std::string_view source) : handle_(handle), source_(source) {}
  ~RustTemplate() override { kvt_template_free(handle_); }
  RustTemplate(const RustTemplate&) = delete;
  RustTemplate& operator=(const RustTemplate&) = delete;

  Result<std::string> render(std::string_view messages_json, std::string_view tools_json, bool add_generation_prompt,
                             std::string_view extra_json) const override {
    TextBuffer out;
    if (const int code = kvt_template_render(handle_, as_str(messages_json), as_str(tools_json), add_generation_prompt,
                                             as_str(extra_json), out.out())) {
      return out.error(code).with_field("messages");
    }
    return std::string(out.text());
  }
  const std::string& source() const override { return source_; }

 private:
  kvt_template* handle_;
  const std::string source_;
};

}  // namespace

Result<std::shared_ptr<const ChatTemplate>> ChatTemplate::compile(std::string_view source, const Tokenizer& tokenizer) {
  const std::vector<int32_t>& end = tokenizer.end_of_generation();
  const std::string bos = tokenizer.token_text(tokenizer.bos());
  const std::string eos = end.empty() ? std::string() : tokenizer.token_text(end[0]);
  kvt_template* handle = nullptr;
  TextBuffer error;
  if (const int code = kvt_template_compile(as_str(source), as_str(bos), as_str(eos), &handle, error.out())) {
    return error.error(code);
  }
  return std::shared_ptr<const ChatTemplate>(std::make_shared<RustTemplate>(handle, source));
}

}  // namespace kvasir::text
