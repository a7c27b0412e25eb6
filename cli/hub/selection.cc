#include "cli/hub/selection.h"

#include <algorithm>
#include <charconv>

#include "core/cat.h"

namespace kvasir::hub {
namespace {

bool ends(const std::string& name, std::string_view tail) { return name.ends_with(tail); }

// "x-00002-of-00005.gguf" is part 2 of 5.
struct Split {
  std::string stem;
  int part = 1, parts = 1;
};
Split split_of(const std::string& name) {
  std::string bare = name.substr(0, name.size() - std::string_view(".gguf").size());
  Split whole{bare, 1, 1};
  size_t at = bare.size() >= 15 ? bare.size() - 15 : std::string::npos;  // "-00001-of-00002"
  if (at == std::string::npos || bare[at] != '-' || bare.compare(at + 6, 4, "-of-") != 0) return whole;
  Split s{bare.substr(0, at), 0, 0};
  auto number = [&](size_t from, int* to) {
    auto [end, error] = std::from_chars(bare.data() + from, bare.data() + from + 5, *to);
    return error == std::errc() && end == bare.data() + from + 5;
  };
  return number(at + 1, &s.part) && number(at + 10, &s.parts) ? s : whole;
}

std::string list_names(const std::vector<const RemoteFile*>& files) {
  std::string out;
  for (size_t i = 0; i < files.size() && i < 12; ++i) out += cat(i ? ", " : "", files[i]->name);
  return files.size() > 12 ? cat(out, " and ", files.size() - 12, " more") : out;
}

// A folder as Hugging Face lays models out, or as Mistral publishes them.
struct FolderForm {
  std::string config, weights;  // what names of files of weights begin with

  bool is_weights(const std::string& name) const {
    return name.starts_with(weights) && ends(name, ".safetensors") && name.find('/') == std::string::npos;
  }
  std::string single() const { return weights + ".safetensors"; }
  std::string index() const { return weights + ".safetensors.index.json"; }

  bool is_in(const std::vector<RemoteFile>& all) const {
    bool has_config = false, some = false, whole = false;
    for (const RemoteFile& f : all) {
      has_config |= f.name == config, some |= is_weights(f.name);
      whole |= f.name == single() || f.name == index();
    }
    return has_config && some && whole;
  }
};

bool is_text_part(const std::string& name) {
  constexpr std::string_view kNames[] = {"tokenizer.json",         "tokenizer_config.json", "chat_template.jinja",
                                         "generation_config.json", "tekken.json",           "spiece.model",
                                         "tiktoken.model"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames) ||
         (name.starts_with("tokenizer.") && name.find(".model") != std::string::npos &&
          name.find('/') == std::string::npos);
}

Result<std::vector<RemoteFile>> folder_files(const HubName& name, const std::vector<RemoteFile>& all) {
  std::vector<RemoteFile> out;
  FolderForm form{"config.json", "model"};
  if (!form.is_in(all)) form = {"params.json", "consolidated"};
  if (!form.is_in(all))
    return not_found(cat(name.repo, " holds no .gguf file, nor config.json with model.safetensors, nor params.json ",
                         "with consolidated.safetensors"))
        .with_field("model");
  auto is = [](const std::string& name) { return [&name](const RemoteFile& f) { return f.name == name; }; };
  const std::string whole = form.single(), index = form.index();
  const bool single = std::any_of(all.begin(), all.end(), is(whole));
  const bool tokens = std::any_of(all.begin(), all.end(), is("tokenizer.json"));
  for (const RemoteFile& f : all) {
    // A repository may hold its weights whole and in shards: the loader reads the whole file then. Of vocabularies it
    // reads tokenizer.json.
    const bool weights = single ? f.name == whole : f.name == index || form.is_weights(f.name);
    const bool other_vocabulary = tokens && (f.name == "tekken.json" || f.name.find(".model") != std::string::npos);
    if (weights || f.name == form.config || (is_text_part(f.name) && !other_vocabulary)) out.push_back(f);
  }
  std::sort(out.begin(), out.end(), [](const RemoteFile& a, const RemoteFile& b) { return a.name < b.name; });
  return out;
}

}  // namespace

bool is_hex(std::string_view text, size_t length) {
  return text.size() == length && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_safe_path(std::string_view path) {
  if (path.empty() || path.size() > 512) return false;
  for (size_t begin = 0; begin <= path.size();) {
    size_t end = std::min(path.find('/', begin), path.size());
    if (end == begin || path[begin] == '.') return false;
    begin = end + 1;
  }
  return std::all_of(path.begin(), path.end(),
                     [](char c) { return static_cast<unsigned char>(c) > ' ' && c != 127 && c != '\\' && c != ':'; });
}

Result<HubName> parse_hub_name(std::string_view name) {
  std::string_view rest = name.substr(3);
  size_t colon = rest.find(':');
  HubName out{std::string(rest.substr(0, colon)),
              colon == std::string_view::npos ? "" : std::string(rest.substr(colon + 1))};
  constexpr std::string_view kPlain = "-._0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  size_t slash = out.repo.find('/');
  bool plain = slash != std::string::npos && out.repo.find('/', slash + 1) == std::string::npos &&
               out.repo.find_first_not_of(cat(kPlain, '/')) == std::string::npos;
  if (!plain || !is_safe_path(out.repo))
    return invalid_argument(cat("model is ", name, "; it must be hf:ORG/REPO or hf:ORG/REPO:FILE")).with_field("model");
  if (colon != std::string_view::npos && (!is_safe_path(out.file) || !ends(out.file, ".gguf")))
    return invalid_argument(cat("model is ", name, "; what follows the second colon must be a .gguf file of ", out.repo,
                                " (safetensors need none)"))
        .with_field("model");
  return out;
}

Result<std::vector<RemoteFile>> choose_files(const HubName& name, const std::vector<RemoteFile>& all) {
  std::vector<const RemoteFile*> models;  // each by its first part
  for (const RemoteFile& f : all)
    if (ends(f.name, ".gguf") && f.name.find("mmproj") == std::string::npos && split_of(f.name).part == 1)
      models.push_back(&f);
  const RemoteFile* first = nullptr;
  if (name.file.empty()) {
    if (models.empty()) return folder_files(name, all);
    if (models.size() > 1)
      return invalid_argument(cat(name.repo, " holds ", models.size(), " models; name one, as in hf:", name.repo, ":",
                                  models[0]->name, ": ", list_names(models)))
          .with_field("model");
    first = models[0];
  } else {
    for (const RemoteFile& f : all)
      if (f.name == name.file) first = &f;
    if (!first)
      return not_found(cat(name.repo, " has no file ", name.file, "; it has ",
                           models.empty() ? "no .gguf file" : list_names(models)))
          .with_field("model");
  }
  Split split = split_of(first->name);
  std::vector<RemoteFile> out;
  for (const RemoteFile& f : all) {
    if (!ends(f.name, ".gguf")) continue;
    Split s = split_of(f.name);
    if (s.stem == split.stem && s.parts == split.parts) out.push_back(f);
  }
  std::sort(out.begin(), out.end(), [](const RemoteFile& a, const RemoteFile& b) { return a.name < b.name; });
  if (int(out.size()) != split.parts)
    return not_found(cat(name.repo, " holds ", out.size(), " of the ", split.parts, " parts of ", first->name))
        .with_field("model");
  return out;
}

}  // namespace kvasir::hub
