#include "attention/cases/npy.h"

#include <cstring>
#include <string_view>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::attention {
namespace {

constexpr std::string_view kMagic{"\x93NUMPY", 6};
constexpr int kMaxRank = 8;

// A Python dict literal of exactly three known keys: that much of it, and no more, is read.
class Header {
 public:
  Header(const std::string& name, std::string_view text) : name_(name), text_(text) {}

  Status read(NpyArray* out) {
    bool descr = false, order = false, shape = false;
    KVASIR_TRY(expect('{'));
    while (!accept('}')) {
      std::string key;
      KVASIR_TRY(quoted(&key));
      KVASIR_TRY(expect(':'));
      bool* seen = key == "descr" ? &descr : key == "fortran_order" ? &order : key == "shape" ? &shape : nullptr;
      if (!seen || *seen) return bad(cat("has an unexpected key '", key, "'"));
      *seen = true;
      if (key == "descr") {
        KVASIR_TRY(quoted(&out->descr));
      } else if (key == "fortran_order") {
        if (accept_word("True")) return bad("is in Fortran order; store it in C order");
        if (!accept_word("False")) return bad("has a fortran_order that is neither True nor False");
      } else {
        KVASIR_TRY(tuple(&out->shape));
      }
      accept(',');
    }
    skip();
    if (at_ != text_.size()) return bad("has text after its dictionary");
    if (!descr || !order || !shape) return bad("lacks descr, fortran_order or shape");
    return {};
  }

 private:
  Status bad(const std::string& what) const {
    return invalid_argument(cat(name_, ": the npy header ", what)).with_field(name_);
  }
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  bool accept(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool accept_word(std::string_view w) {
    skip();
    if (text_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }
  Status expect(char c) { return accept(c) ? Status() : bad(cat("has no '", c, "' at its byte ", at_)); }
  Status quoted(std::string* out) {
    skip();
    const char q = at_ < text_.size() ? text_[at_] : 0;
    if (q != '\'' && q != '"') return bad(cat("has no string at its byte ", at_));
    const size_t end = text_.find(q, at_ + 1);
    if (end == std::string_view::npos) return bad("has a string without an end");
    *out = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return {};
  }
  Status tuple(std::vector<int64_t>* out) {
    KVASIR_TRY(expect('('));
    while (!accept(')')) {
      skip();
      int64_t n = 0;
      const size_t first = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
        if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, text_[at_] - '0', &n))
          return bad("has a dimension past 2^63");
        ++at_;
      }
      if (at_ == first) return bad("has a shape that is not a tuple of whole numbers");
      if (out->size() == kMaxRank) return bad(cat("has more than ", kMaxRank, " dimensions"));
      out->push_back(n);
      accept(',');
    }
    return {};
  }

  const std::string& name_;
  std::string_view text_;
  size_t at_ = 0;
};

bool known_descr(std::string_view d) {
  for (std::string_view k : {"<f4", "<f2", "<f8", "<u2", "|u1", "|i1", "<i4", "<i8"})
    if (d == k) return true;
  return false;
}

}  // namespace

const char* descr_of(DType type) {
  switch (type) {
    case DType::f32: return "<f4";
    case DType::f16: return "<f2";
    case DType::bf16: return "<u2";
    case DType::i8: return "|i1";
    default: return "|u1";
  }
}

int64_t NpyArray::elements() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

std::string NpyArray::shape_text() const {
  std::string s = "(";
  for (size_t i = 0; i < shape.size(); ++i) s += cat(i ? ", " : "", shape[i]);
  return s + ")";
}

Result<NpyArray> parse_npy(const std::string& name, const uint8_t* bytes, size_t size) {
  auto bad = [&](const std::string& what) { return invalid_argument(cat(name, " ", what)).with_field(name); };
  if (size < 10 || std::memcmp(bytes, kMagic.data(), kMagic.size()) != 0)
    return Status(bad("is not an npy file: it does not begin with \\x93NUMPY and a version"));
  const int major = bytes[6];
  if (major < 1 || major > 3) return Status(bad(cat("has npy version ", major, "; versions 1 to 3 are known")));
  const size_t lead = major == 1 ? 10 : 12;
  if (size < lead) return Status(bad("ends inside its npy header"));
  size_t length = size_t(bytes[8]) | size_t(bytes[9]) << 8;
  if (major > 1) length |= size_t(bytes[10]) << 16 | size_t(bytes[11]) << 24;
  if (length > size - lead)
    return Status(
        bad(cat("ends inside its npy header: ", length, " bytes are announced, ", size - lead, " are there")));

  NpyArray array;
  KVASIR_TRY(Header(name, {reinterpret_cast<const char*>(bytes) + lead, length}).read(&array));
  if (!known_descr(array.descr))
    return Status(bad(cat("holds '", log_escape(array.descr), "'; known are <f4 <f2 <f8 <u2 |u1 |i1 <i4 <i8")));
  int64_t want = npy_item_bytes(array.descr.back());
  for (int64_t d : array.shape)
    if (__builtin_mul_overflow(want, d, &want)) return Status(bad("has a shape of more than 2^63 bytes"));
  const size_t have = size - lead - length;
  if (uint64_t(want) != have)
    return Status(bad(cat("has ", have, " bytes of data; its header says ", array.shape_text(), " of ", array.descr,
                          ", which is ", want)));
  array.data.assign(bytes + lead + length, bytes + size);
  return array;
}

std::vector<uint8_t> format_npy(const NpyArray& array) {
  std::string header = cat("{'descr': '", array.descr, "', 'fortran_order': False, 'shape': (");
  for (size_t i = 0; i < array.shape.size(); ++i)
    header += cat(array.shape[i], array.shape.size() == 1 ? "," : i + 1 < array.shape.size() ? ", " : "");
  header += "), }";
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::vector<uint8_t> out(kMagic.begin(), kMagic.end());
  for (uint8_t b : {uint8_t(1), uint8_t(0), uint8_t(header.size() & 255), uint8_t(header.size() >> 8)})
    out.push_back(b);
  out.insert(out.end(), header.begin(), header.end());
  out.insert(out.end(), array.data.begin(), array.data.end());
  return out;
}

}  // namespace kvasir::attention
