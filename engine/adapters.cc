#include "engine/adapters.h"

#include <cctype>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::engine {
namespace {

constexpr size_t kMostName = 128;

Status not_loaded(const std::string& name) {
  return not_found(cat("the adapter '", name.substr(0, kMostName), "' is not loaded")).with_field("adapter");
}

}  // namespace

Status check_adapter_name(const std::string& name) {
  bool good = !name.empty() && name.size() <= kMostName && std::isalnum(uint8_t(name[0]));
  for (char c : name)
    good = good && (std::isalnum(uint8_t(c)) || std::string_view("-_.:/@+").find(c) != std::string::npos);
  if (good) return {};
  return invalid_argument(cat("an adapter's name has 1 to ", kMostName,
                              " letters, digits, '-', '_', '.', ':', '/', '@' and '+', of which the first is a letter "
                              "or a digit"))
      .with_field("lora_name");
}

Result<AdapterInfo> Adapters::load(const std::string& name, const std::string& path, const Load& load) {
  KVASIR_TRY(check_adapter_name(name));
  std::lock_guard one_after_another(loading_);
  {
    std::lock_guard lock(mutex_);
    if (by_name_.contains(name))
      return Status(Code::already_exists, cat("the adapter '", name, "' is loaded already; unload it first"))
          .with_field("lora_name");
  }
  auto adapter = load(path, memory_ - held_->load());
  if (!adapter.ok())
    return Status(adapter.status().code(),
                  cat("the adapter '", name, "' cannot be loaded: ", adapter.status().message()))
        .with_field("lora_path");
  const AdapterInfo info{name, path, (*adapter)->bytes(), (*adapter)->rank()};
  held_->fetch_add(info.bytes);
  auto release = [held = held_, bytes = info.bytes](const LoadedAdapter* a) {
    delete a;
    held->fetch_sub(bytes);
  };
  LoadedAdapterPtr loaded(new LoadedAdapter{info, cat(++loads_, ':', name), std::move(*adapter)}, release);
  std::lock_guard lock(mutex_);
  by_name_[name] = std::move(loaded);
  log_info("adapter loaded", {{"name", name}, {"path", path}, {"rank", info.rank}, {"bytes", info.bytes}});
  return info;
}

Status Adapters::unload(const std::string& name) {
  LoadedAdapterPtr gone;
  {
    std::lock_guard lock(mutex_);
    const auto it = by_name_.find(name);
    if (it == by_name_.end()) return not_loaded(name);
    gone = std::move(it->second);
    by_name_.erase(it);
  }
  log_info("adapter unloaded", {{"name", name}});
  return {};
}

Result<LoadedAdapterPtr> Adapters::find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) return not_loaded(name);
  return it->second;
}

std::vector<AdapterInfo> Adapters::all() const {
  std::lock_guard lock(mutex_);
  std::vector<AdapterInfo> out;
  for (const auto& [name, loaded] : by_name_) out.push_back(loaded->info);
  return out;
}

}  // namespace kvasir::engine
