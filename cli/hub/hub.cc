#include "cli/hub/hub.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/hub/progress.h"
#include "cli/hub/selection.h"
#include "core/cat.h"
#include "core/log.h"

namespace kvasir::hub {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;
constexpr size_t kMostListing = size_t(64) << 20;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string or_else(std::string first, std::string second) { return first.empty() ? std::move(second) : first; }

Result<fs::path> models_folder(const HubOptions& o) {
  if (!o.folder.empty()) return fs::path(o.folder);
  std::string cache = environment("XDG_CACHE_HOME"), home = environment("HOME");
  if (!cache.empty()) return fs::path(cache) / "kvasir" / "models";
  if (!home.empty()) return fs::path(home) / ".cache" / "kvasir" / "models";
  return failed_precondition("there is no HOME to keep models in; set --model-folder").with_field("model_folder");
}

Result<Url> endpoint_of(const HubOptions& o) {
  std::string text = or_else(o.endpoint, or_else(environment("HF_ENDPOINT"), "https://huggingface.co"));
  KVASIR_ASSIGN(Url url, parse_url(text));
  if (!url.tls && !url.loopback())
    return invalid_argument(cat("HF_ENDPOINT is ", text, "; it must be https, or on this machine"));
  while (url.target.ends_with('/')) url.target.pop_back();
  return url;
}

Url below(Url endpoint, std::string_view path) {
  endpoint.target += path;
  return endpoint;
}

struct Listing {
  std::string commit;
  std::vector<RemoteFile> files;
};

Result<Listing> list_files(const HttpClient& client, const Url& endpoint, const HubName& name) {
  Url url = below(endpoint, cat("/api/models/", escape_path(name.repo), "/revision/main?blobs=true"));
  KVASIR_ASSIGN(std::string text, client.get_text(url, kMostListing));
  json j = json::parse(text, nullptr, false);
  auto bad = [&](const char* what) { return unavailable(cat(endpoint.origin(), " lists ", name.repo, what)); };
  if (!j.is_object() || !j.contains("sha") || !j["sha"].is_string() || !j.contains("siblings") ||
      !j["siblings"].is_array())
    return bad(" in a form that is not understood");
  Listing out{j["sha"], {}};
  if (!is_hex(out.commit, 40)) return bad(" at a commit that is no commit");
  for (const json& s : j["siblings"]) {
    if (!s.is_object() || !s.contains("rfilename") || !s["rfilename"].is_string()) continue;
    RemoteFile f{s["rfilename"], s.value("size", json(-1)).is_number_integer() ? s.value("size", int64_t(-1)) : -1, ""};
    if (!is_safe_path(f.name)) continue;  // nothing we would write
    json lfs = s.value("lfs", json());
    if (lfs.is_object() && lfs.contains("sha256") && lfs["sha256"].is_string())
      f.checksum = cat("sha256:", lfs["sha256"].get<std::string>());
    else if (s.contains("blobId") && s["blobId"].is_string())
      f.checksum = cat("git:", s["blobId"].get<std::string>());
    out.files.push_back(std::move(f));
  }
  return out;
}

Status check_sizes(const std::vector<RemoteFile>& files, const fs::path& folder, const HubOptions& o) {
  int64_t all = 0, missing = 0;
  for (const RemoteFile& f : files) {
    std::string sum = f.checksum.substr(f.checksum.find(':') + 1);
    if (f.size < 0 || !is_hex(sum, f.checksum.starts_with("git:") ? 40 : 64))
      return failed_precondition(cat("the endpoint says no size or no checksum of ", f.name, "; it is not downloaded"));
    std::error_code error;
    if (all > INT64_MAX - f.size) return invalid_argument("the files are larger than any disk");
    all += f.size;
    uintmax_t here = fs::file_size(fs::path(folder / f.name).concat(cat('.', sum.substr(0, 16), ".part")), error);
    missing += f.size - (error ? 0 : std::min<int64_t>(f.size, int64_t(here)));
  }
  if (all > o.limit.bytes)
    return resource_exhausted(cat("the model is ", all, " bytes large; download_limit is ", o.limit.bytes))
        .with_field("download_limit");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return failed_precondition(cat("cannot make the folder ", folder.string(), ": ", error.message()));
  fs::space_info space = fs::space(folder, error);
  constexpr int64_t kSpare = int64_t(64) << 20;
  if (!error && space.available < uintmax_t(missing) + kSpare)
    return resource_exhausted(cat("the disk of ", folder.string(), " has ", space.available, " bytes left; ", missing,
                                  " are needed, and ", kSpare, " to spare"))
        .with_field("model_folder");
  return {};
}

// What a finished download was made of, written last: its presence says that the rest is whole.
fs::path record_path(const fs::path& folder, const HubName& name) {
  std::string file = name.file.empty() ? "model" : name.file;
  std::replace(file.begin(), file.end(), '/', '+');
  return folder / cat(".", file, ".kvasir.json");
}

Status write_record(const fs::path& path, const Listing& listing, const std::vector<RemoteFile>& files) {
  json j{{"commit", listing.commit}, {"files", json::array()}};
  for (const RemoteFile& f : files) j["files"].push_back({{"name", f.name}, {"size", f.size}, {"sum", f.checksum}});
  fs::path part = fs::path(path).concat(".part");
  std::ofstream(part) << j.dump(1) << '\n';
  std::error_code error;
  fs::rename(part, path, error);
  return error ? failed_precondition(cat("cannot write ", path.string(), ": ", error.message())) : Status();
}

// The files of an earlier download; empty when any is missing or has another size.
std::vector<RemoteFile> recorded(const fs::path& folder, const HubName& name) {
  std::ifstream in(record_path(folder, name));
  json j = json::parse(in, nullptr, false);
  std::vector<RemoteFile> out;
  if (!j.is_object() || !j.contains("files") || !j["files"].is_array()) return {};
  for (const json& f : j["files"]) {
    if (!f.is_object() || !f.contains("name") || !f["name"].is_string() || !f.contains("size") ||
        !f["size"].is_number_unsigned())
      return {};
    out.push_back({f["name"], f["size"], ""});
    std::error_code error;
    if (!is_safe_path(out.back().name) ||
        fs::file_size(folder / out.back().name, error) != uintmax_t(out.back().size) || error)
      return {};
  }
  return out;
}

// Two processes that want the same model: the second waits, and then finds it.
class Lock {
 public:
  explicit Lock(const fs::path& folder) : fd_(::open((folder / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_ >= 0 && ::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      log_info("another process downloads the same model; waiting for it", {{"folder", folder.string()}});
      ::flock(fd_, LOCK_EX);
    }
  }
  ~Lock() {
    if (fd_ >= 0) ::close(fd_);
  }
  Lock(const Lock&) = delete;

 private:
  int fd_;
};

std::string path_of(const fs::path& folder, const std::vector<RemoteFile>& files) {
  return files.front().name.ends_with(".gguf") ? (folder / files.front().name).string() : folder.string();
}

}  // namespace

void HubOptions::define(Options& o) {
  o.add("model_folder", &folder, "Where models named hf:... are kept; empty is kvasir/models in the user's cache")
      .value_name("DIR");
  o.add("download_limit", &limit, "The largest model that hf:... may download");
  o.add("offline", &offline, "Use what was downloaded before and ask nobody; $HF_HUB_OFFLINE=1 does the same");
}

Result<std::string> local_model(const std::string& model, const HubOptions& options) {
  if (!model.starts_with("hf:")) return model;
  KVASIR_ASSIGN(HubName name, parse_hub_name(model));
  KVASIR_ASSIGN(fs::path folder, models_folder(options));
  folder /= name.repo;
  if (auto files = recorded(folder, name); !files.empty()) return path_of(folder, files);
  std::string quiet = environment("HF_HUB_OFFLINE");
  if (options.offline || (!quiet.empty() && quiet != "0"))
    return not_found(cat(model, " is not in ", folder.string(), ", and offline nothing is downloaded"))
        .with_field("model");
  KVASIR_ASSIGN(Url endpoint, endpoint_of(options));
  HttpClient client({or_else(options.token, environment("HF_TOKEN")), options.patience});
  KVASIR_ASSIGN(Listing listing, list_files(client, endpoint, name));
  KVASIR_ASSIGN(auto files, choose_files(name, listing.files));
  KVASIR_TRY(check_sizes(files, folder, options));
  Lock lock(folder);
  if (auto there = recorded(folder, name); !there.empty()) return path_of(folder, there);
  ProgressLine line(files);
  for (const RemoteFile& f : files) {
    Url url = below(endpoint, cat('/', escape_path(name.repo), "/resolve/", listing.commit, '/', escape_path(f.name)));
    KVASIR_TRY(download(client, url, f, folder / f.name, options.download,
                        [&](const RemoteFile& file, int64_t done) { line.at(file, done); }));
  }
  line.finish();
  KVASIR_TRY(write_record(record_path(folder, name), listing, files));
  return path_of(folder, files);
}

}  // namespace kvasir::hub
