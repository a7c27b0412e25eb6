// Bytes of text that become tokens a second of one processor, by kind of text: prose and code as people send them, and
// what nobody's words are, which no memory of earlier words helps. With no text may 8 MB cost more than 2 s.
//   tokenize_bench MODEL... [--mib N] [--file TEXT] [--no-library]      one JSON object a line
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "core/cat.h"
#include "model/runner.h"
#include "model/text/bounded.h"

namespace kvasir {
namespace {

// Of this thread on a processor: what others do beside it does not count.
double now() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

void append_utf8(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out += char(c);
  } else if (c < 0x800) {
    out += {char(0xC0 | c >> 6), char(0x80 | (c & 63))};
  } else {
    out += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
  }
}

// Random characters of [first, last], `words` at most to a word (0: none ends).
std::string random_text(size_t bytes, uint32_t first, uint32_t last, int words) {
  std::mt19937 random(7);
  std::string out;
  for (int left = words; out.size() < bytes;) {
    if (words > 0 && --left < 0) {
      out += ' ';
      left = int(random() % uint32_t(words));
    }
    append_utf8(out, first + random() % (last - first + 1));
  }
  return out;
}

std::string repeated(const std::string& part, size_t bytes) {
  std::string out;
  while (out.size() < bytes) out += part;
  return out;
}

// Words as often as people use them: the n-th word is 1/n as frequent as the first, of 20,000.
std::string like_prose(size_t bytes) {
  std::mt19937 random(11);
  std::vector<std::string> words(20'000);
  for (auto& word : words)
    for (auto n = 1 + random() % 5 + random() % 6; n > 0; --n)
      word += "etaoinshrdlucmfwypvbgkjqxz"[random() % (random() % 26 + 1)];
  std::string out;
  const double most = std::log(double(words.size()));
  while (out.size() < bytes) {
    const double at = std::exp(std::generate_canonical<double, 32>(random) * most) - 1;
    out += words[std::min(size_t(at), words.size() - 1)];
    const auto end = random() % 24;
    out += end == 0 ? ".\n" : end < 3 ? ", " : " ";
  }
  return out;
}

int failed(const std::string& model, const Status& why) {
  std::fprintf(stderr, "tokenize_bench: %s: %s\n", model.c_str(), why.to_string().c_str());
  return 1;
}

// What one text costs: {"model": ..., and so on}, or why it is refused.
Status measure(const text::BoundedTokenizer& tokenizer, const std::string& text, bool library, std::string& out) {
  double took[2] = {};
  Result<std::vector<int32_t>> ids[2] = {std::vector<int32_t>(), std::vector<int32_t>()};
  for (const bool by_library : {false, true}) {
    if (by_library && !library) break;
    const double began = now();
    ids[by_library] = tokenizer.encode_within({.by_library = by_library}, text, false, true);
    took[by_library] = now() - began;
    KVASIR_TRY(ids[by_library].status());
  }
  const double bytes = double(text.size());
  out = cat("\"bytes\": ", text.size(), ", \"tokens\": ", ids[0]->size(), ", \"mb_per_s\": ", bytes / took[0] / 1e6,
            ", \"seconds_for_8_mb\": ", 8e6 / bytes * took[0]);
  if (library)
    out += cat(", \"library_mb_per_s\": ", bytes / took[1] / 1e6,
               ", \"same_ids\": ", *ids[0] == *ids[1] ? "true" : "false");
  return {};
}

int run(const std::vector<std::string>& models, size_t bytes, const std::string& file, bool library) {
  struct Kind {
    const char* name;
    std::string text;
  };
  std::vector<Kind> kinds;
  if (!file.empty()) {
    std::ifstream in(file, std::ios::binary);
    kinds.push_back({"file", repeated({std::istreambuf_iterator<char>(in), {}}, bytes)});
  }
  kinds.push_back({"prose", like_prose(bytes)});
  kinds.push_back({"one sentence", repeated("The quick brown fox jumps over the lazy dog. ", bytes)});
  kinds.push_back({"records", repeated("{\"id\": 1048, \"name\": \"Ann\", \"tags\": [1, 22, 333]},\n", bytes)});
  kinds.push_back({"random words", random_text(bytes, 'a', 'z', 12)});
  kinds.push_back({"random long words", random_text(bytes, 'a', 'z', 400)});
  kinds.push_back({"random ASCII", random_text(bytes, '!', '~', 60)});
  kinds.push_back({"digits", random_text(bytes, '0', '9', 12)});
  kinds.push_back({"punctuation", random_text(bytes, '!', '/', 30)});
  kinds.push_back({"Cyrillic", random_text(bytes, 0x430, 0x44F, 12)});
  kinds.push_back({"Chinese", random_text(bytes, 0x4E00, 0x9FA5, 20)});
  kinds.push_back({"lines", repeated("a\n", bytes)});
  kinds.push_back({"spaces", repeated(std::string(250'000, ' ') + "word word", bytes)});
  kinds.push_back({"blank lines", repeated(std::string(250'000, '\n') + "word word", bytes)});
  kinds.push_back({"a", repeated(std::string(250'000, 'a') + " word word", bytes)});
  kinds.push_back({"words of a letter", repeated("a ", bytes)});
  for (const std::string& model : models) {
    model::RunnerOptions options;
    options.model = model;
    auto text = model::load_text(options);
    if (!text.ok()) return failed(model, text.status());
    if (!text->tokenizer) return failed(model, not_found("it has no tokenizer"));
    const auto* bounded = dynamic_cast<const text::BoundedTokenizer*>(text->tokenizer.get());
    for (const Kind& kind : kinds) {
      std::string figures;
      const Status measured = measure(*bounded, kind.text, library, figures);
      if (!measured.ok()) figures = cat("\"refused\": \"", measured.message(), '"');
      std::printf("{\"model\": \"%s\", \"text\": \"%s\", %s}\n", model.substr(model.rfind('/') + 1).c_str(), kind.name,
                  figures.c_str());
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvasir

int main(int argc, char** argv) {
  std::vector<std::string> models;
  std::string file;
  size_t mib = 8;
  bool library = true;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--mib" && i + 1 < argc) {
      mib = size_t(std::max(1, std::atoi(argv[++i])));
    } else if (word == "--file" && i + 1 < argc) {
      file = argv[++i];
    } else if (word == "--no-library") {
      library = false;
    } else {
      models.push_back(word);
    }
  }
  if (models.empty()) {
    std::fprintf(stderr, "usage: tokenize_bench MODEL... [--mib N] [--file TEXT] [--no-library]\n");
    return 2;
  }
  return kvasir::run(models, mib << 20, file, library);
}
