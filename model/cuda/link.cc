#include "model/cuda/link.h"

#include "core/cat.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// In both directions, from the thread of the first: allocations of either are then read by the other.
Status let_read(int device, int peer) {
  int can = 0;
  KVASIR_TRY(check(cudaDeviceCanAccessPeer(&can, device, peer), "peer access"));
  if (!can)
    return failed_precondition(cat("GPU ", device, " cannot read the memory of GPU ", peer,
                                   ", which ranks on several GPUs need: choose GPUs that can (nvidia-smi topo -p2p r), "
                                   "or one of them"))
        .with_field("device");
  KVASIR_TRY(check(cudaSetDevice(device), "device"));
  const cudaError_t e = cudaDeviceEnablePeerAccess(peer, 0);
  if (e == cudaErrorPeerAccessAlreadyEnabled) return cudaGetLastError(), Status();
  return check(e, "peer access");
}

}  // namespace

Result<std::unique_ptr<Link>> Link::open(std::vector<int> devices) {
  std::unique_ptr<Link> link(new Link(std::move(devices)));
  int before = 0;
  KVASIR_TRY(check(cudaGetDevice(&before), "device"));
  KVASIR_TRY(link->flag_.allocate(sizeof(uint32_t)));
  *link->flag_.as<uint32_t>() = 0;
  for (int32_t rank = 0; rank < link->ranks(); ++rank) {
    for (int32_t peer = 0; peer < link->ranks(); ++peer)
      if (peer != rank) KVASIR_TRY(let_read(link->device(rank), link->device(peer)));
    KVASIR_TRY(check(cudaSetDevice(link->device(rank)), "device"));
    KVASIR_TRY(link->barriers_[size_t(rank)].allocate(sizeof(Barrier)));
    KVASIR_TRY(check(cudaMemset(link->barriers_[size_t(rank)].get(), 0, sizeof(Barrier)), "barrier"));
    KVASIR_TRY(check(cudaDeviceSynchronize(), "barrier"));
    for (LinkView& view : link->views_) view.barriers[rank] = link->barriers_[size_t(rank)].as<Barrier>();
    LinkView& own = link->views_[size_t(rank)];
    own.rank = rank, own.ranks = link->ranks(), own.lost = link->flag_.as<uint32_t>();
  }
  KVASIR_TRY(check(cudaSetDevice(before), "device"));
  return link;
}

Link::~Link() = default;

void Link::publish_partials(int32_t rank, const void* first, const void* second) {
  std::lock_guard lock(mutex_);
  for (LinkView& view : views_) view.partials[0][rank] = first, view.partials[1][rank] = second;
}

void Link::publish_squares(int32_t rank, float* squares) {
  std::lock_guard lock(mutex_);
  for (LinkView& view : views_) view.squares[rank] = squares;
}

void Link::publish_logits(int32_t rank, const float* logits, const Share& columns) {
  std::lock_guard lock(mutex_);
  for (LinkView& view : views_)
    view.logits[rank] = logits, view.first[rank] = columns.first, view.count[rank] = columns.count;
}

Status Link::join() {
  int before = 0;
  KVASIR_TRY(check(cudaGetDevice(&before), "device"));
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    KVASIR_TRY(check(cudaSetDevice(device(rank)), "device"));
    KVASIR_TRY(check(cudaDeviceSynchronize(), "barrier"));
    KVASIR_TRY(check(cudaMemset(barriers_[size_t(rank)].get(), 0, sizeof(Barrier)), "barrier"));
    KVASIR_TRY(check(cudaDeviceSynchronize(), "barrier"));
  }
  joined_ = true;
  return check(cudaSetDevice(before), "device");
}

void Link::lose(int32_t rank, const Status& why) {
  std::lock_guard lock(mutex_);
  if (why_.ok())
    why_ = unavailable(
        cat("rank ", rank, " of ", ranks(), " is lost, and no step can be computed without it: ", why.message()));
  __atomic_store_n(flag_.as<uint32_t>(), 1u, __ATOMIC_RELEASE);
}

Status Link::lost() const {
  std::lock_guard lock(mutex_);
  if (why_.ok() && __atomic_load_n(flag_.as<uint32_t>(), __ATOMIC_ACQUIRE) != 0)
    return unavailable("a GPU has waited 20 s for another one in a step, and no step can be computed without it");
  return why_;
}

}  // namespace kvasir::model::cuda
