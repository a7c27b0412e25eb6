// Templates are told the day, in that server's two forms, and requests may say another.
#include "model/dated_template.h"

#include <gtest/gtest.h>

namespace kvasir::model {
namespace {

// Writes down what it is given.
class Plain final : public text::ChatTemplate {
 public:
  Result<std::string> render(std::string_view messages, std::string_view tools, bool prompt,
                             std::string_view extra) const override {
    return std::string(messages) + "|" + std::string(tools) + (prompt ? "|prompt|" : "||") + std::string(extra);
  }
  const std::string& source() const override { return source_; }

 private:
  std::string source_ = "source";
};

constexpr std::time_t kDay = 1722038399;  // 26 July 2024, a second before midnight

TEST(DatedTemplate, TellsTheDayInBothForms) {
  const auto dated = dated_template(std::make_shared<Plain>(), [] { return kDay; });
  EXPECT_EQ(*dated->render("[]", "", true), R"([]||prompt|{"date_string":"26 Jul 2024","datetime":"Jul 26 2024"})");
  EXPECT_EQ(*dated->render("[]", "[1]", false, R"({"a":1})"),
            R"([]|[1]||{"a":1,"date_string":"26 Jul 2024","datetime":"Jul 26 2024"})");
  EXPECT_EQ(dated->source(), "source");
}

TEST(DatedTemplate, WhatARequestSaysHolds) {
  const auto dated = dated_template(std::make_shared<Plain>(), [] { return kDay + 1; });
  EXPECT_EQ(*dated->render("[]", "", false, R"({"date_string":"today"})"),
            R"([]|||{"date_string":"today","datetime":"Jul 27 2024"})");
  EXPECT_EQ(*dated->render("[]", "", false, "no JSON"), "[]|||no JSON");  // which the template refuses
}

}  // namespace
}  // namespace kvasir::model
