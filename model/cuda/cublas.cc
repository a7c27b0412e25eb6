#include "model/cuda/cublas.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/log.h"

namespace kvasir::model::cuda {
namespace {

constexpr size_t kWorkspace = 32 << 20;
// Ways of multiplying that are timed, so many times each, and the bytes that are written to empty L2.
constexpr int kWays = 4, kTimes = 3;
// Smaller weights and shorter rows gain nothing, and timing them would be felt when a size is new.
constexpr int64_t kTimedWeights = int64_t(4) << 20, kTimedElements = 1024;
constexpr size_t kFlush = size_t(96) << 20;
// Parts of k summed up by themselves and then added, in float32 and one order.
constexpr uint32_t kApart = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

std::vector<std::string> candidates() {
  std::vector<std::string> out;
  if (const char* named = std::getenv("KVASIR_CUBLASLT")) out.push_back(named);
  out.insert(out.end(), {"libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so.13"});
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache)
    out.push_back(cat(cache, "/kvasir/cuda/lib/libcublasLt.so.13"));
  else if (home)
    out.push_back(cat(home, "/.cache/kvasir/cuda/lib/libcublasLt.so.13"));
  return out;
}

Status check(cublasStatus_t s, const char* what) {
  if (s == CUBLAS_STATUS_SUCCESS) return {};
  return internal_error(cat("cuBLASLt: ", what, " answered ", int(s)));
}

}  // namespace

// What was chosen in this process, so that models of one shape get equal numbers.
class Cublas::Choices {
 public:
  std::optional<int> find(const Shape& shape) {
    std::lock_guard lock(mutex_);
    const auto it = chosen_.find(shape);
    return it == chosen_.end() ? std::nullopt : std::optional(it->second);
  }
  void keep(const Shape& shape, int way) {
    std::lock_guard lock(mutex_);
    chosen_.emplace(shape, way);
  }

 private:
  std::mutex mutex_;
  std::map<Shape, int> chosen_;
};
Cublas::Choices& Cublas::choices() {
  static Choices all;
  return all;
}

// Its functions, under the names and types the header gives them.
struct Cublas::Functions {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoCheck) algorithm_check = nullptr;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algorithm_get = nullptr;

  Status open() {
    void* library = nullptr;
    std::string tried;
    for (const std::string& path : candidates()) {
      if ((library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))) break;
      tried += cat(tried.empty() ? "" : ", ", path);
    }
    if (!library)
      return failed_precondition(
          cat("cuBLASLt was not found (tried ", tried, "); install it or name the file in KVASIR_CUBLASLT"));
    bool all = true;
    auto find = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::decay_t<decltype(f)>>(::dlsym(library, name));
      all &= f != nullptr;
    };
    find(create, "cublasLtCreate"), find(destroy, "cublasLtDestroy");
    find(desc_create, "cublasLtMatmulDescCreate"), find(desc_destroy, "cublasLtMatmulDescDestroy");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(layout_create, "cublasLtMatrixLayoutCreate"), find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic"), find(matmul, "cublasLtMatmul");
    find(algorithm_check, "cublasLtMatmulAlgoCheck"), find(algorithm_get, "cublasLtMatmulAlgoConfigGetAttribute");
    return all ? Status()
               : failed_precondition("the cuBLASLt that was found lacks functions; version 12 or 13 is needed");
  }
};

// One shape's description and the algorithm the library proposes for it.
struct Cublas::Plan {
  explicit Plan(const Functions& f) : f(f) {}
  ~Plan() {
    for (cublasLtMatrixLayout_t l : {weight, in, out})
      if (l) f.layout_destroy(l);
    if (desc) f.desc_destroy(desc);
  }
  const Functions& f;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, in = nullptr, out = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> ways;  // as the library ranks them
  int best = 0;
  bool timed = false, in_one_order = false;
  Shape shape;
};

Cublas::Cublas() = default;
Cublas::~Cublas() {
  plans_.clear();
  for (cudaEvent_t e : {began_, ended_})
    if (e) cudaEventDestroy(e);
  if (handle_) f_->destroy(static_cast<cublasLtHandle_t>(handle_));
}

Result<std::unique_ptr<Cublas>> Cublas::open(cudaStream_t stream) {
  std::unique_ptr<Cublas> c(new Cublas);
  c->f_ = std::make_unique<Functions>();
  c->stream_ = stream;
  KVASIR_TRY(c->f_->open());
  KVASIR_TRY(check(c->f_->create(reinterpret_cast<cublasLtHandle_t*>(&c->handle_)), "cublasLtCreate"));
  KVASIR_TRY(c->workspace_.allocate(kWorkspace));
  for (cudaEvent_t* e : {&c->began_, &c->ended_}) KVASIR_TRY(attention::cuda::check(cudaEventCreate(e), "event"));
  return c;
}

Status Cublas::set_scales(Plan& p, Scales scales) {
  for (auto [attribute, value] : {std::pair(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales.weight),
                                  std::pair(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales.in)})
    KVASIR_TRY(check(f_->desc_set(p.desc, attribute, &value, sizeof value), "scales"));
  return {};
}

// Of what the library knows for `p`, as many ways as `to` has room for.
Status Cublas::ask(const Plan& p, Plan& to, uint32_t schemes) {
  cublasLtMatmulPreference_t preference = nullptr;
  KVASIR_TRY(check(f_->preference_create(&preference), "preference"));
  size_t most = kWorkspace;
  cublasStatus_t s = f_->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
  if (s == CUBLAS_STATUS_SUCCESS)
    s = f_->preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes);
  int count = 0;
  if (s == CUBLAS_STATUS_SUCCESS)
    s = f_->heuristic(static_cast<cublasLtHandle_t>(handle_), p.desc, p.weight, p.in, p.out, p.out, preference,
                      int(to.ways.size()), to.ways.data(), &count);
  f_->preference_destroy(preference);
  KVASIR_TRY(check(s, "heuristic"));
  to.ways.resize(size_t(count));
  return {};
}

Result<Cublas::Plan*> Cublas::plan(const Shape& shape, Scales scales) {
  const auto& [rows, n, k, stride, form, elements] = shape;
  auto& slot = plans_[shape];
  if (slot) return slot.get();
  const Functions& f = *f_;
  auto p = std::make_unique<Plan>(f);
  // Rows lie one behind another; the library thinks in columns, so weight is k x n transposed, in is k x rows.
  KVASIR_TRY(check(f.desc_create(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description"));
  cublasOperation_t transposed = CUBLAS_OP_T;
  KVASIR_TRY(check(f.desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), "description"));
  const bool bytes = elements != Elements::bf16;
  if (bytes) {
    // Sums of products of two roundings to 3 bits need no more than the matrix unit's own.
    const int8_t fast = 1;
    KVASIR_TRY(check(f.desc_set(p->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast), "description"));
  }
  if (elements == Elements::fp8_scaled) {
    const cublasLtMatmulMatrixScale_t each = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    for (auto attribute : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE})
      KVASIR_TRY(check(f.desc_set(p->desc, attribute, &each, sizeof each), "scales"));
    KVASIR_TRY(set_scales(*p, scales));
  }
  auto layout = [&](cublasLtMatrixLayout_t* l, cudaDataType_t type, int64_t r, int64_t c, int64_t apart) {
    return check(f.layout_create(l, type, uint64_t(r), uint64_t(c), apart), "layout");
  };
  const cudaDataType_t type = bytes ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
  KVASIR_TRY(layout(&p->weight, type, k, n, k));
  KVASIR_TRY(layout(&p->in, type, k, rows, k));
  KVASIR_TRY(layout(&p->out, form == Form::bf16 ? CUDA_R_16BF : CUDA_R_32F, n, rows, stride));
  p->shape = shape;
  const std::optional<int> chosen = choices().find(p->shape);
  const bool worth = rows <= kTimedRows && k >= kTimedElements && n * k >= kTimedWeights;
  p->timed = !worth || chosen;
  p->best = chosen.value_or(0);
  p->ways.resize(worth ? kWays : 1);
  KVASIR_TRY(ask(*p, *p, CUBLASLT_REDUCTION_SCHEME_MASK));
  if (p->ways.empty())
    return internal_error(cat("cuBLASLt knows no way to multiply ", rows, " x ", k, " by ", k, " x ", n));
  slot = std::move(p);
  return slot.get();
}

namespace {

// Sums each result in an order that only the way itself decides: k in one piece, or in so many that are added up after.
bool keeps_one_order(const Cublas::Functions& f, const cublasLtMatmulAlgo_t& way) {
  int32_t parts = 0;
  uint32_t scheme = 0;
  size_t written = 0;
  const bool known =
      f.algorithm_get(&way, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, &written) == CUBLAS_STATUS_SUCCESS &&
      f.algorithm_get(&way, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &written) ==
          CUBLAS_STATUS_SUCCESS;
  return known && scheme == (parts > 1 ? kApart : uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE));
}

}  // namespace

// The first of the ways for some rows that takes any number of them and sums in one order.
Result<Cublas::Plan*> Cublas::one_order(const Shape& shape) {
  constexpr int64_t kSome = 64;
  constexpr int kAsked = 24;
  Shape some = shape;
  some.rows = kSome;
  auto& slot = ordered_[some];
  if (slot) return slot.get();
  KVASIR_ASSIGN(Plan * p, plan(some, {}));
  auto found = std::make_unique<Plan>(*f_);
  found->ways.resize(kAsked);
  KVASIR_TRY(ask(*p, *found, CUBLASLT_REDUCTION_SCHEME_NONE | kApart));
  for (const cublasLtMatmulHeuristicResult_t& way : found->ways) {
    bool takes_all = keeps_one_order(*f_, way.algo);
    for (int64_t rows : {1, 3, 16, 33, 129, 1000, 4096}) {
      if (!takes_all) break;
      some.rows = rows;
      KVASIR_ASSIGN(Plan * other, plan(some, {}));
      cublasLtMatmulHeuristicResult_t checked = {};
      takes_all = f_->algorithm_check(static_cast<cublasLtHandle_t>(handle_), other->desc, other->weight, other->in,
                                      other->out, other->out, &way.algo, &checked) == CUBLAS_STATUS_SUCCESS &&
                  checked.workspaceSize <= kWorkspace;
    }
    if (!takes_all) continue;
    found->ways = {cublasLtMatmulHeuristicResult_t(way)};
    slot = std::move(found);
    return slot.get();
  }
  slot = std::make_unique<Plan>(*f_);  // without a way
  return slot.get();
}

Result<bool> Cublas::has_one_order(int64_t n, int64_t k, Form form) {
  KVASIR_ASSIGN(const Plan* way, one_order({0, n, k, n, form, Elements::bf16}));
  return !way->ways.empty();
}

Status Cublas::product_in_one_order(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k,
                                    Form form) {
  KVASIR_ASSIGN(Plan * p, plan({rows, n, k, n, form, Elements::bf16}, {}));
  if (!p->in_one_order) {
    KVASIR_ASSIGN(const Plan* same, one_order(p->shape));
    KVASIR_CHECK(!same->ways.empty(), "products in one order by ", k, " x ", n);
    p->ways = same->ways, p->best = 0, p->timed = p->in_one_order = true;
  }
  return multiply(*p, p->best, in, weight, out);
}

Status Cublas::multiply(const Plan& p, int way, const void* in, const void* weight, void* out) {
  const float alpha = 1, beta = p.shape.form == Form::added_f32 ? 1.0f : 0.0f;
  return check(f_->matmul(static_cast<cublasLtHandle_t>(handle_), p.desc, &alpha, weight, p.weight, in, p.in, &beta,
                          out, p.out, out, p.out, &p.ways[size_t(way)].algo, workspace_.get(), kWorkspace, stream_),
               "product");
}

// What the library ranks first is not always fastest where weights come from device memory, so L2 is emptied before
// each.
Status Cublas::choose(Plan& p, const void* in, const void* weight, int64_t out_bytes) {
  p.timed = true;
  if (p.ways.size() == 1) return {};
  const size_t wanted = std::max(kFlush, size_t(out_bytes));
  if (scratch_bytes_ < wanted) KVASIR_TRY(scratch_.allocate(scratch_bytes_ = wanted));
  float fastest = 0, first = 0;
  for (int way = 0; way < int(p.ways.size()); ++way) {
    float took[kTimes];
    bool runs = true;
    for (int i = 0; i < kTimes && runs; ++i) {
      KVASIR_TRY(attention::cuda::check(cudaMemsetAsync(scratch_.get(), 0, wanted, stream_), "timing a product"));
      KVASIR_TRY(attention::cuda::check(cudaEventRecord(began_, stream_), "timing a product"));
      runs = multiply(p, way, in, weight, scratch_.get()).ok();
      KVASIR_TRY(attention::cuda::check(cudaEventRecord(ended_, stream_), "timing a product"));
      KVASIR_TRY(attention::cuda::check(cudaEventSynchronize(ended_), "timing a product"));
      KVASIR_TRY(attention::cuda::check(cudaEventElapsedTime(&took[i], began_, ended_), "timing a product"));
    }
    if (!runs) continue;
    std::sort(took, took + kTimes);
    const float median = took[kTimes / 2];
    if (way == 0) first = median;
    // An equal of the library's choice is no reason to leave it.
    if (fastest == 0 || median < fastest * (p.best == 0 ? 0.98f : 1.0f)) fastest = median, p.best = way;
  }
  choices().keep(p.shape, p.best);
  log_debug("product", {{"rows", p.shape.rows},
                        {"features", p.shape.n},
                        {"elements", p.shape.k},
                        {"fp8", p.shape.elements != Elements::bf16},
                        {"way", p.best},
                        {"us", 1e3 * fastest},
                        {"first_way_us", 1e3 * first}});
  return {};
}

Status Cublas::product(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                       Elements elements, Scales scales, int64_t stride) {
  if (stride == 0) stride = n;
  KVASIR_ASSIGN(Plan * p, plan({rows, n, k, stride, form, elements}, scales));
  if (elements == Elements::fp8_scaled) KVASIR_TRY(set_scales(*p, scales));
  if (!p->timed) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    KVASIR_TRY(attention::cuda::check(cudaStreamIsCapturing(stream_, &capturing), "product"));
    if (capturing == cudaStreamCaptureStatusNone) KVASIR_TRY(choose(*p, in, weight, rows * stride * 4));
  }
  return multiply(*p, p->best, in, weight, out);
}

}  // namespace kvasir::model::cuda
