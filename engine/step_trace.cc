#include "engine/step_trace.h"

#include <cerrno>
#include <cstring>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::engine {
namespace {

double us(Duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

}  // namespace

// An event a line, and no closing bracket until the end: the format allows it to be missing, so the
// trace of a server that was killed can be read too.
StepTrace::StepTrace(std::string file) {
  if (file.empty()) return;
  file_ = std::fopen(file.c_str(), "w");
  if (!file_) {
    status_ = failed_precondition(cat("step_trace '", file, "' cannot be written: ", std::strerror(errno),
                                      "; name a file in a folder that this user may write to"))
                  .with_field("step_trace");
    return;
  }
  on_ = true;
  origin_ = std::chrono::steady_clock::now();
  std::fputs("[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"kvasir\"}}", file_);
}

StepTrace::~StepTrace() {
  if (!file_) return;
  std::fputs("\n]\n", file_);
  std::fclose(file_);
}

void StepTrace::write(const StepSample& s) {
  if (!file_) return;
  double at = us(s.began - origin_), took = us(s.ended - s.began);
  std::fprintf(
      file_,
      ",\n{\"name\":\"step\",\"ph\":\"X\",\"pid\":1,\"tid\":1,\"ts\":%.1f,\"dur\":%.1f,\"args\":{\"step\":%llu,"
      "\"decodes\":%d,\"prefills\":%d,\"tokens\":%lld,\"plan_us\":%.1f,\"run_us\":%.1f,\"advance_us\":%.1f,\"late\":%d}"
      "}",
      at, took, static_cast<unsigned long long>(s.step), s.decodes, s.prefills, static_cast<long long>(s.tokens),
      s.plan_us, s.run_us, s.advance_us, s.late);
  std::fprintf(
      file_,
      ",\n{\"name\":\"requests\",\"ph\":\"C\",\"pid\":1,\"ts\":%.1f,\"args\":{\"running\":%lld,\"waiting\":%lld}}"
      ",\n{\"name\":\"pages\",\"ph\":\"C\",\"pid\":1,\"ts\":%.1f,\"args\":{\"used\":%lld,\"cached\":%lld}}",
      at, static_cast<long long>(s.running), static_cast<long long>(s.waiting), at,
      static_cast<long long>(s.pages_total - s.pages_free - s.pages_cached), static_cast<long long>(s.pages_cached));
  if (!std::ferror(file_)) return;
  log_warn("the step trace ends here: it can no longer be written", {{"why", std::strerror(errno)}});
  std::fclose(file_);
  file_ = nullptr;
}

}  // namespace kvasir::engine
