// Regular expressions that end a text as soon as one of them matches what has come so far, for which its end is the end
// of the text (`$`). Their work is linear in the text, whatever they are; back references and look-around are refused.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/text/rust/kvasir_text.h"

namespace kvasir::text {

class StopExpressions {
 public:
  // A refusal begins with the place of the wrong one: "[1] is no regular expression ...".
  static Result<std::shared_ptr<const StopExpressions>> compile(std::vector<std::string> expressions);
  ~StopExpressions() { kvt_stops_free(handle_); }
  StopExpressions(const StopExpressions&) = delete;
  StopExpressions& operator=(const StopExpressions&) = delete;

  const std::string& expression(size_t which) const { return expressions_[which]; }

  // One text, piece by piece.
  class Scan {
   public:
    explicit Scan(const StopExpressions& expressions);
    ~Scan() { kvt_scan_free(handle_); }
    Scan(const Scan&) = delete;
    Scan& operator=(const Scan&) = delete;

    struct Found {
      size_t end = 0, which = 0;  // bytes of the piece up to the match's end; whose match
    };
    std::optional<Found> push(std::string_view more);

   private:
    kvt_scan* handle_ = nullptr;
  };

 private:
  StopExpressions(kvt_stops* handle, std::vector<std::string> expressions)
      : handle_(handle), expressions_(std::move(expressions)) {}

  kvt_stops* handle_;
  const std::vector<std::string> expressions_;
};

}  // namespace kvasir::text
