#include "model/dated_template.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace kvasir::model {
namespace {

using Json = nlohmann::ordered_json;

class Dated final : public text::ChatTemplate {
 public:
  Dated(std::shared_ptr<const text::ChatTemplate> plain, std::function<std::time_t()> now)
      : plain_(std::move(plain)), now_(std::move(now)) {}

  Result<std::string> render(std::string_view messages_json, std::string_view tools_json, bool add_generation_prompt,
                             std::string_view extra_json) const override {
    Json variables = extra_json.empty() ? Json::object() : Json::parse(extra_json, nullptr, false);
    if (!variables.is_object()) return plain_->render(messages_json, tools_json, add_generation_prompt, extra_json);
    const std::time_t now = now_();
    std::tm day{};
    ::gmtime_r(&now, &day);
    for (const auto& [name, format] : {std::pair("date_string", "%d %b %Y"), std::pair("datetime", "%b %d %Y")}) {
      char text[32];
      if (!variables.contains(name) && std::strftime(text, sizeof text, format, &day) > 0) variables[name] = text;
    }
    return plain_->render(messages_json, tools_json, add_generation_prompt,
                          variables.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  const std::string& source() const override { return plain_->source(); }

 private:
  const std::shared_ptr<const text::ChatTemplate> plain_;
  const std::function<std::time_t()> now_;
};

}  // namespace

std::shared_ptr<const text::ChatTemplate> dated_template(std::shared_ptr<const text::ChatTemplate> plain,
                                                         std::function<std::time_t()> now) {
  return std::make_shared<Dated>(std::move(plain), std::move(now));
}

}  // namespace kvasir::model
