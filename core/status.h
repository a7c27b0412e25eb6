// Bad input is a value: Status says what was wrong in words a user can act on,
// Result<T> is a value or that. (A broken invariant is a crash instead: core/check.h.)
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace kvasir {

// The numbers are gRPC's, so that crossing the wire is a cast.
enum class Code : int {
  ok = 0,
  cancelled = 1,
  unknown = 2,
  invalid_argument = 3,
  deadline_exceeded = 4,
  not_found = 5,
  already_exists = 6,
  permission_denied = 7,
  resource_exhausted = 8,
  failed_precondition = 9,
  aborted = 10,
  out_of_range = 11,
  unimplemented = 12,
  internal = 13,
  unavailable = 14,
  data_loss = 15,
  unauthenticated = 16,
};

const char* code_name(Code code);  // "INVALID_ARGUMENT"
int http_status(Code code);        // 400

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

  // Which request field is at fault ("temperature"); empty when none is.
  const std::string& field() const { return field_; }
  Status&& with_field(std::string field) && {
    field_ = std::move(field);
    return std::move(*this);
  }

  // When a refusal is worth trying again.
  std::optional<std::chrono::milliseconds> retry_after() const { return retry_after_; }
  Status&& with_retry_after(std::chrono::milliseconds d) && {
    retry_after_ = d;
    return std::move(*this);
  }

  std::string to_string() const;  // "INVALID_ARGUMENT: temperature is -1; ..."

 private:
  Code code_ = Code::ok;
  std::string message_;
  std::string field_;
  std::optional<std::chrono::milliseconds> retry_after_;
};

inline Status invalid_argument(std::string m) { return {Code::invalid_argument, std::move(m)}; }
inline Status not_found(std::string m) { return {Code::not_found, std::move(m)}; }
inline Status internal_error(std::string m) { return {Code::internal, std::move(m)}; }
inline Status unavailable(std::string m) { return {Code::unavailable, std::move(m)}; }
inline Status unimplemented(std::string m) { return {Code::unimplemented, std::move(m)}; }
inline Status resource_exhausted(std::string m) { return {Code::resource_exhausted, std::move(m)}; }
inline Status failed_precondition(std::string m) { return {Code::failed_precondition, std::move(m)}; }

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::in_place_index<1>, std::move(value)) {}
  Result(Status status) : v_(std::in_place_index<0>, std::move(status)) {}

  bool ok() const { return v_.index() == 1; }
  explicit operator bool() const { return ok(); }
  Status status() const { return ok() ? Status() : std::get<0>(v_); }
  T& value() & { return std::get<1>(v_); }
  const T& value() const& { return std::get<1>(v_); }
  T&& value() && { return std::get<1>(std::move(v_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<Status, T> v_;
};

#define KVASIR_CAT_(a, b) a##b
#define KVASIR_CAT(a, b) KVASIR_CAT_(a, b)

// Return the error of a Status expression, if it has one.
#define KVASIR_TRY(expr)                                                              \
  do {                                                                                \
    if (::kvasir::Status try_status_ = (expr); !try_status_.ok()) return try_status_; \
  } while (0)

// KVASIR_ASSIGN(auto file, open(path)): the value, or return the error.
#define KVASIR_ASSIGN(lhs, expr) KVASIR_ASSIGN_(KVASIR_CAT(assign_result_, __LINE__), lhs, expr)
#define KVASIR_ASSIGN_(tmp, lhs, expr) \
  auto tmp = (expr);                   \
  if (!tmp.ok()) return tmp.status();  \
  lhs = std::move(tmp).value()

}  // namespace kvasir
