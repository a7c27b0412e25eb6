// How one option's value is read, checked and written back.
#include <charconv>
#include <cmath>

#include "core/config.h"

namespace kvasir {
namespace {

template <class... F>
struct overloaded : F... {
  using F::operator()...;
};
template <class... F>
overloaded(F...) -> overloaded<F...>;

template <class T>
bool parse_number(std::string_view text, T* out) {
  if (text.starts_with('+')) text.remove_prefix(1);
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

struct Unit {
  std::string_view name;
  double factor;
};

constexpr Unit kByteUnits[] = {{"B", 1},        {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0},
                               {"TiB", 0x1p40}, {"K", 1024.0},   {"M", 1048576.0},   {"G", 1073741824.0},
                               {"T", 0x1p40},   {"KB", 1000.0},  {"MB", 1e6},        {"GB", 1e9},
                               {"TB", 1e12}};
constexpr Unit kTimeUnits[] = {{"ms", 1}, {"s", 1000}, {"m", 60000}, {"h", 3600000}, {"d", 86400000}};

// A number and the name of its unit, with nothing between or around them but spaces.
std::optional<double> parse_with_unit(std::string_view text, std::span<const Unit> units, double no_unit) {
  size_t split = text.find_first_not_of("+-.0123456789");
  double number;
  if (!parse_number(text.substr(0, split), &number) || !std::isfinite(number)) return std::nullopt;
  if (split == std::string_view::npos) return number * no_unit;
  std::string_view unit = text.substr(split);
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  for (const Unit& u : units)
    if (u.name == unit) return number * u.factor;
  return std::nullopt;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (const std::string& p : parts) out += (out.empty() ? "" : std::string(separator)) + p;
  return out;
}

std::string write_bytes(int64_t bytes) {
  for (auto [unit, shift] : {std::pair{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}})
    if (bytes != 0 && bytes % (int64_t(1) << shift) == 0) return cat(bytes >> shift, unit);
  return cat(bytes);
}

std::string write_duration(int64_t ms) {
  for (auto [unit, factor] : {std::pair{"h", 3600000}, {"m", 60000}, {"s", 1000}})
    if (ms != 0 && ms % factor == 0) return cat(ms / factor, unit);
  return cat(ms, "ms");
}

}  // namespace

Result<ByteSize> parse_bytes(std::string_view text) {
  auto value = parse_with_unit(text, kByteUnits, 1);
  if (!value || *value < 0 || *value >= 0x1p63)
    return invalid_argument(cat("\"", text, "\" is not a size; write it like 1048576, 512MiB or 4GB"));
  return ByteSize{int64_t(*value)};
}

Result<std::chrono::milliseconds> parse_duration(std::string_view text) {
  auto value = parse_with_unit(text, kTimeUnits, 1000);
  if (!value || *value < 0 || *value >= 0x1p53)
    return invalid_argument(cat("\"", text, "\" is not a duration; write it like 500ms, 30s, 5m or 2h"));
  return std::chrono::milliseconds(int64_t(std::llround(*value)));
}

Option& Option::range(double low, double high) {
  low_ = low, high_ = high;
  return *this;
}
Option& Option::one_of(std::vector<std::string> choices) {
  choices_ = std::move(choices);
  return *this;
}
Option& Option::secret() {
  secret_ = true;
  return *this;
}
Option& Option::value_name(std::string name) {
  value_name_ = std::move(name);
  return *this;
}
Option& Option::only_flag() {
  only_flag_ = true;
  return *this;
}

std::string Option::flag() const {
  std::string out = positional_ ? "" : "--";
  for (char c : name_) out += c == '_' ? '-' : c;
  return out;
}

std::string Option::variable() const {
  std::string out = "KVASIR_";
  for (char c : name_) out += c >= 'a' && c <= 'z' ? char(c - 'a' + 'A') : c;
  return out;
}

std::string Option::value() const {
  return std::visit(overloaded{[](const bool* v) { return cat(*v); }, [](const std::string* v) { return *v; },
                               [](const ByteSize* v) { return write_bytes(v->bytes); },
                               [](const Millis* v) { return write_duration(v->count()); },
                               [](const std::vector<std::string>* v) { return join(*v, ","); },
                               [](const auto* v) { return cat(*v); }},
                    target_);
}

std::string Option::type_hint() const {
  if (!value_name_.empty()) return value_name_;
  if (!choices_.empty()) return join(choices_, "|");
  return std::visit(overloaded{[](const bool*) { return ""; }, [](const double*) { return "NUMBER"; },
                               [](const ByteSize*) { return "SIZE"; }, [](const Millis*) { return "DURATION"; },
                               [](const std::string*) { return "TEXT"; },
                               [](const std::vector<std::string>*) { return "TEXT"; }, [](const auto*) { return "N"; }},
                    target_);
}

std::string Option::limit_text(double v) const {
  if (std::holds_alternative<ByteSize*>(target_)) return write_bytes(int64_t(v));
  if (std::holds_alternative<Millis*>(target_)) return write_duration(int64_t(v * 1000));
  if (v >= double(INT64_MAX)) return cat(INT64_MAX);
  return v == std::floor(v) && v > double(INT64_MIN) ? cat(int64_t(v)) : cat(v);
}

Status Option::refuse(std::string_view text, const std::string& why) const {
  std::string shown = secret_ ? "(hidden)" : std::string(text);
  return invalid_argument(cat(flag(), " is ", shown.empty() ? "empty" : shown, "; ", why)).with_field(name_);
}

Status Option::check(std::string_view text) const {
  auto in_range = [&](double v) -> Status {
    if (v >= low_ && v <= high_) return {};
    if (std::isinf(high_)) return refuse(text, cat("it must be at least ", limit_text(low_)));
    return refuse(text, cat("it must be between ", limit_text(low_), " and ", limit_text(high_)));
  };
  auto in_choices = [&](const std::string& v) -> Status {
    for (const std::string& c : choices_)
      if (c == v) return {};
    if (choices_.empty()) return {};
    std::string near = nearest_name(v, choices_);
    return refuse(
        v, cat("it must be one of ", join(choices_, ", "), near.empty() ? "" : cat(" (did you mean ", near, "?)")));
  };
  return std::visit(
      overloaded{[](const bool*) -> Status { return {}; }, [&](const std::string* v) { return in_choices(*v); },
                 [&](const std::vector<std::string>* v) -> Status {
                   for (const std::string& each : *v) KVASIR_TRY(in_choices(each));
                   return {};
                 },
                 [&](const ByteSize* v) { return in_range(double(v->bytes)); },
                 [&](const Millis* v) { return in_range(double(v->count()) / 1000); },
                 [&](const auto* v) { return in_range(double(*v)); }},
      target_);
}

Status Option::assign(std::string_view text, const std::string& source, bool append) {
  Status read = std::visit(
      overloaded{[&](bool* v) -> Status {
                   if (text == "true" || text == "1" || text == "on" || text == "yes") return *v = true, Status();
                   if (text == "false" || text == "0" || text == "off" || text == "no") return *v = false, Status();
                   return refuse(text, "it must be true or false");
                 },
                 [&](std::string* v) -> Status { return *v = text, Status(); },
                 [&](ByteSize* v) -> Status {
                   auto size = parse_bytes(text);
                   return size.ok() ? (*v = *size, Status()) : refuse(text, "write a size like 1048576, 512MiB or 4GB");
                 },
                 [&](Millis* v) -> Status {
                   auto time = parse_duration(text);
                   return time.ok() ? (*v = *time, Status())
                                    : refuse(text, "write a duration like 500ms, 30s, 5m or 2h");
                 },
                 [&](std::vector<std::string>* v) -> Status {
                   if (!append) v->clear();
                   return v->emplace_back(text), Status();
                 },
                 [&](double* v) -> Status {
                   return parse_number(text, v) && std::isfinite(*v) ? Status() : refuse(text, "it must be a number");
                 },
                 [&](auto* v) -> Status {
                   return parse_number(text, v) ? Status()
                                                : refuse(text, "it must be a whole number that fits its type");
                 }},
      target_);
  if (read.ok()) read = check(text);
  if (read.ok()) {
    source_ = source;
    return read;
  }
  return invalid_argument(cat(read.message(), " (from ", source, ")")).with_field(name_);
}

}  // namespace kvasir
