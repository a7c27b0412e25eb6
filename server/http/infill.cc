#include "server/http/infill.h"

namespace kvasir::server::http {
namespace {

// By family; those of files are not in all of them.
constexpr struct {
  const char *prefix, *suffix, *middle, *repository, *file;
} kFamilies[] = {
    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"},
    {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"},
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<reponame>", "<filename>"},
    {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", ""},
    {"▁<PRE>", "▁<SUF>", "▁<MID>", "", ""},
};

struct Marks {
  int32_t prefix = -1, suffix = -1, middle = -1, repository = -1, file = -1;
};

Marks marks_of(const text::Tokenizer& tokenizer) {
  auto id = [&](const char* text) { return *text ? tokenizer.token_id(text) : -1; };
  for (const auto& f : kFamilies)
    if (Marks m{id(f.prefix), id(f.suffix), id(f.middle), id(f.repository), id(f.file)};
        m.prefix >= 0 && m.suffix >= 0 && m.middle >= 0)
      return m;
  return {};
}

}  // namespace

bool fills_gaps(const text::Tokenizer& tokenizer) { return marks_of(tokenizer).prefix >= 0; }

Result<PromptInput> infill_prompt(const Gap& gap, const text::Tokenizer* tokenizer, const char* field) {
  const Marks marks = tokenizer ? marks_of(*tokenizer) : Marks();
  if (marks.prefix < 0)
    return invalid_argument(
               std::string(field) +
               " is not served here: this model has no tokens for a gap; send what stands before it as a prompt")
        .with_field(field);
  if (!gap.files.empty() && (marks.repository < 0 || marks.file < 0))
    return invalid_argument(
               "input_extra is not served here: this model has no tokens for files; put them into input_prefix")
        .with_field("input_extra");
  PiecesInput out;
  out.parse_special = false;    // what stands in a file is text
  out.pieces.emplace_back("");  // where the tokenizer begins a prompt
  auto mark = [&](int32_t id) { out.pieces.emplace_back(int64_t{id}); };
  if (!gap.files.empty()) {
    mark(marks.repository);
    out.pieces.emplace_back("project\n");
    for (const auto& [name, text] : gap.files) {
      mark(marks.file);
      out.pieces.emplace_back(name + "\n" + text);
    }
    mark(marks.file);
    out.pieces.emplace_back("filename\n");
  }
  mark(marks.prefix);
  out.pieces.emplace_back(gap.prefix);
  mark(marks.suffix);
  out.pieces.emplace_back(gap.suffix);
  mark(marks.middle);
  return PromptInput(std::move(out));
}

}  // namespace kvasir::server::http
