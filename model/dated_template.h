// A chat template that is told what day it is, by the names that llama-server gives it: templates of Llama 3 and others
// have a date of their own where they are told none, as transformers tells them none.
#pragma once

#include <ctime>
#include <functional>
#include <memory>

#include "model/text/text.h"

namespace kvasir::model {

// The same, with the variables `date_string` ("26 Jul 2024") and `datetime` ("Jul 26 2024"), in UTC, where a request
// brings none of that name.
std::shared_ptr<const text::ChatTemplate> dated_template(
    std::shared_ptr<const text::ChatTemplate> plain,
    std::function<std::time_t()> now = [] { return std::time(nullptr); });

}  // namespace kvasir::model
