#include "model/cuda/cublas.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace kvasir::model::cuda {
namespace {

constexpr size_t kWorkspace = 32 << 20;

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
  cublasLtMatmulAlgo_t algorithm{};
};

Cublas::Cublas() = default;
Cublas::~Cublas() {
  plans_.clear();
  if (handle_) f_->destroy(static_cast<cublasLtHandle_t>(handle_));
}

Result<std::unique_ptr<Cublas>> Cublas::open(cudaStream_t stream) {
  std::unique_ptr<Cublas> c(new Cublas);
  c->f_ = std::make_unique<Functions>();
  c->stream_ = stream;
  KVASIR_TRY(c->f_->open());
  KVASIR_TRY(check(c->f_->create(reinterpret_cast<cublasLtHandle_t*>(&c->handle_)), "cublasLtCreate"));
  KVASIR_TRY(c->workspace_.allocate(kWorkspace));
  return c;
}

Result<const Cublas::Plan*> Cublas::plan(int64_t rows, int64_t n, int64_t k, Form form) {
  auto& slot = plans_[{rows, n, k, form}];
  if (slot) return slot.get();
  const Functions& f = *f_;
  auto p = std::make_unique<Plan>(f);
  // Rows lie one behind another; the library thinks in columns, so weight is k x n transposed, in is k x rows.
  KVASIR_TRY(check(f.desc_create(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description"));
  cublasOperation_t transposed = CUBLAS_OP_T;
  KVASIR_TRY(check(f.desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), "description"));
  auto layout = [&](cublasLtMatrixLayout_t* l, cudaDataType_t type, int64_t r, int64_t c) {
    return check(f.layout_create(l, type, uint64_t(r), uint64_t(c), r), "layout");
  };
  KVASIR_TRY(layout(&p->weight, CUDA_R_16BF, k, n));
  KVASIR_TRY(layout(&p->in, CUDA_R_16BF, k, rows));
  KVASIR_TRY(layout(&p->out, form == Form::bf16 ? CUDA_R_16BF : CUDA_R_32F, n, rows));
  cublasLtMatmulPreference_t preference = nullptr;
  KVASIR_TRY(check(f.preference_create(&preference), "preference"));
  size_t most = kWorkspace;
  cublasStatus_t s = f.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  if (s == CUBLAS_STATUS_SUCCESS)
    s = f.heuristic(static_cast<cublasLtHandle_t>(handle_), p->desc, p->weight, p->in, p->out, p->out, preference, 1,
                    &found, &count);
  f.preference_destroy(preference);
  KVASIR_TRY(check(s, "heuristic"));
  if (count == 0) return internal_error(cat("cuBLASLt knows no way to multiply ", rows, " x ", k, " by ", k, " x ", n));
  p->algorithm = found.algo;
  slot = std::move(p);
  return slot.get();
}

Status Cublas::product(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form) {
  KVASIR_ASSIGN(const Plan* p, plan(rows, n, k, form));
  float alpha = 1, beta = form == Form::added_f32 ? 1.0f : 0.0f;
  return check(f_->matmul(static_cast<cublasLtHandle_t>(handle_), p->desc, &alpha, weight, p->weight, in, p->in, &beta,
                          out, p->out, out, p->out, &p->algorithm, workspace_.get(), kWorkspace, stream_),
               "product");
}

}  // namespace kvasir::model::cuda
