// Bytes of text that become tokens a second on one core, by kind of text: prose and code as people send them, and what
// nobody's words are, which no memory of earlier words helps.
//   tokenize_bench MODEL... [--mib N] [--file TEXT]      one JSON object a line
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "model/runner.h"
#include "model/text/bounded.h"

namespace kvasir {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

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

int run(const std::vector<std::string>& models, size_t bytes, const std::string& file) {
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
  for (const std::string& model : models) {
    model::RunnerOptions options;
    options.model = model;
    auto text = model::load_text(options);
    if (!text.ok()) return failed(model, text.status());
    if (!text->tokenizer) return failed(model, not_found("it has no tokenizer"));
    for (const Kind& kind : kinds) {
      const auto* bounded = dynamic_cast<const text::BoundedTokenizer*>(text->tokenizer.get());
      double took[2] = {};
      Result<std::vector<int32_t>> ids[2] = {std::vector<int32_t>(), std::vector<int32_t>()};
      for (const bool by_library : {false, true}) {
        const double began = now();
        ids[by_library] = bounded->encode_within({.by_library = by_library}, kind.text, false, true);
        took[by_library] = now() - began;
        if (!ids[by_library].ok()) return failed(model, ids[by_library].status());
      }
      std::printf(
          "{\"model\": \"%s\", \"text\": \"%s\", \"bytes\": %zu, \"tokens\": %zu, \"mb_per_s\": %.2f, "
          "\"library_mb_per_s\": %.2f, "
          "\"same_ids\": %s}\n",
          model.substr(model.rfind('/') + 1).c_str(), kind.name, kind.text.size(), ids[0]->size(),
          double(kind.text.size()) / took[0] / 1e6, double(kind.text.size()) / took[1] / 1e6,
          *ids[0] == *ids[1] ? "true" : "false");
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
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--mib" && i + 1 < argc) {
      mib = size_t(std::max(1, std::atoi(argv[++i])));
    } else if (word == "--file" && i + 1 < argc) {
      file = argv[++i];
    } else {
      models.push_back(word);
    }
  }
  if (models.empty()) {
    std::fprintf(stderr, "usage: tokenize_bench MODEL... [--mib N] [--file TEXT]\n");
    return 2;
  }
  return kvasir::run(models, mib << 20, file);
}
