#include "model/text/stop_expressions.h"

#include "model/text/border.h"

namespace kvasir::text {

Result<std::shared_ptr<const StopExpressions>> StopExpressions::compile(std::vector<std::string> expressions) {
  std::vector<kvt_str> views;
  views.reserve(expressions.size());
  for (const std::string& e : expressions) views.push_back(as_str(e));
  kvt_stops* handle = nullptr;
  TextBuffer error;
  if (const int code = kvt_stops_compile(views.data(), views.size(), &handle, error.out())) return error.error(code);
  return std::shared_ptr<const StopExpressions>(new StopExpressions(handle, std::move(expressions)));
}

// A panic behind the border leaves no scan, which then finds nothing: an answer goes on rather than fail.
StopExpressions::Scan::Scan(const StopExpressions& expressions) {
  TextBuffer error;
  if (kvt_scan_new(expressions.handle_, &handle_, error.out())) handle_ = nullptr;
}

std::optional<StopExpressions::Scan::Found> StopExpressions::Scan::push(std::string_view more) {
  if (handle_ == nullptr || more.empty()) return std::nullopt;
  uint8_t found = 0;
  Found where;
  TextBuffer error;
  if (kvt_scan_push(handle_, as_str(more), &found, &where.end, &where.which, error.out()) || !found)
    return std::nullopt;
  return where;
}

}  // namespace kvasir::text
