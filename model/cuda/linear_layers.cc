#include "model/cuda/linear_layers.h"

#include <algorithm>
#include <cmath>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// LinearConfig::fits_gpu(), by name.
Status takes(const LinearConfig& c) {
  auto refuse = [](const char* name, int32_t is, const std::string& must) {
    return unimplemented(cat("the model's ", name, " is ", is, "; on a GPU it is ", must, ": --device cpu"));
  };
  if (c.taps != kTaps) return refuse("linear_conv_kernel_dim", c.taps, cat(kTaps));
  if (c.key_dim > kMostDim) return refuse("linear_key_head_dim", c.key_dim, cat("at most ", kMostDim));
  if (c.value_dim > kMostDim) return refuse("linear_value_head_dim", c.value_dim, cat("at most ", kMostDim));
  return {};
}

Result<std::vector<float>> fetched(const float* from, int64_t count) {
  std::vector<float> v(static_cast<size_t>(count));
  KVASIR_TRY(check(cudaMemcpy(v.data(), from, v.size() * sizeof(float), cudaMemcpyDeviceToHost), "linear attention"));
  return v;
}

}  // namespace

Result<int32_t> LinearLayers::add(const DeltaRule& rule, const float* conv, const float* decay, const float* bias,
                                  const float* norm) {
  const LinearConfig& c = rule.config;
  KVASIR_TRY(takes(c));
  KVASIR_CHECK(!slots_.get(), "a layer after the states have their room");
  auto layer = std::make_unique<Layer>();
  layer->config = c, layer->norm = norm, layer->eps = rule.eps;
  // As the kernels read them: the weights of one tap after another, and decays as they are multiplied by.
  KVASIR_ASSIGN(const std::vector<float> by_channel, fetched(conv, kTaps * c.channels()));
  std::vector<float> by_tap(by_channel.size());
  for (int64_t i = 0; i < c.channels(); ++i)
    for (int64_t j = 0; j < kTaps; ++j) by_tap[size_t(j * c.channels() + i)] = by_channel[size_t(i * kTaps + j)];
  KVASIR_TRY(layer->conv.upload(by_tap.data(), by_tap.size() * sizeof(float)));
  KVASIR_ASSIGN(std::vector<float> fades, fetched(decay, c.value_heads));
  for (float& f : fades) f = rule.log_decay ? std::exp(f) : -f;
  KVASIR_TRY(layer->decay.upload(fades.data(), fades.size() * sizeof(float)));
  KVASIR_TRY(layer->bias.upload(bias, size_t(c.value_heads) * sizeof(float)));
  layer->at = slot_floats_;
  slot_floats_ += slot_floats(c);
  KVASIR_TRY(make_room(c));
  layers_.push_back(std::move(layer));
  return int32_t(layers_.size() - 1);
}

Status LinearLayers::make_room(const LinearConfig& c) {
  auto room = [&](attention::cuda::DeviceMemory& memory, int64_t& cols, int64_t wanted, int64_t bytes) -> Status {
    if (cols >= wanted) return {};
    cols = wanted;
    return memory.allocate(size_t(max_tokens_ * cols * bytes));
  };
  KVASIR_TRY(room(mixed_, channels_, c.channels(), 2));
  KVASIR_TRY(room(fades_, heads_, c.value_heads, sizeof(float2)));
  KVASIR_TRY(room(had_, values_, c.values(), 4));
  for (Table& t : tables_) {
    if (t.host.get()) continue;
    const size_t bytes = size_t(max_tokens_) * (sizeof(StateRows) + sizeof(int32_t));
    KVASIR_TRY(t.device.allocate(bytes));
    KVASIR_TRY(t.host.allocate(bytes));
  }
  return {};
}

Status LinearLayers::set_slots(int64_t slots) {
  if (slots < 1) return internal_error("a model with states is given no room for any");
  slot_count_ = slots;
  return slots_.allocate(size_t(slots * slot_floats_) * sizeof(float));
}

Status LinearLayers::copy(int32_t from, int32_t to) {
  KVASIR_CHECK(from < slot_count_ && to < slot_count_, "a copy of state ", from, " to ", to, " of ", slot_count_);
  const size_t bytes = size_t(slot_floats_) * sizeof(float);
  return check(cudaMemcpyAsync(slots_.bytes() + size_t(to) * bytes, slots_.bytes() + size_t(from) * bytes, bytes,
                               cudaMemcpyDeviceToDevice, stream_),
               "states");
}

Status LinearLayers::begin(const Batch& batch, int64_t rows, int slot) {
  if (std::ssize(batch.states) != batch.size())
    return internal_error(cat("a step of ", batch.size(), " sequences says the states of ", batch.states.size()));
  const int64_t own = batch.seqstarts.back();
  rows_ = rows, sequences_ = batch.size() + rows - own;
  KVASIR_CHECK(rows_ <= max_tokens_ && (rows == own || own == batch.size()), own, " rows as ", rows, " of ",
               max_tokens_);
  table_ = &tables_[slot];
  auto* of = table_->host.as<StateRows>();
  auto* sequence_of = reinterpret_cast<int32_t*>(of + sequences_);
  for (int64_t i = 0; i < sequences_; ++i) {
    if (i >= batch.size()) {
      const int64_t row = own + i - batch.size();
      of[i] = {int32_t(row), 1, -1, 0}, sequence_of[row] = int32_t(i);
      continue;
    }
    const int64_t first = batch.seqstarts[size_t(i)], end = batch.seqstarts[size_t(i) + 1];
    const int32_t state = batch.states[size_t(i)];
    KVASIR_CHECK(state >= 0 && state < slot_count_, "state ", state, " of ", slot_count_);
    of[i] = {int32_t(first), int32_t(end - first), state, batch.start_pos[size_t(i)] == 0};
    std::fill(sequence_of + first, sequence_of + end, int32_t(i));
  }
  singles_ = std::find_if(of, of + sequences_, [](const StateRows& s) { return s.count != 1; }) - of;
  const auto bytes = size_t(sequences_) * sizeof(StateRows) + size_t(rows_) * sizeof(int32_t);
  return check(cudaMemcpyAsync(table_->device.get(), of, bytes, cudaMemcpyHostToDevice, stream_), "states");
}

DeltaStep LinearLayers::step(int32_t id, const float* in, const float* betas, void* out) const {
  const Layer& layer = *layers_[size_t(id)];
  DeltaStep s;
  s.shape = shape_of(layer.config);
  s.rows = rows_, s.sequences = sequences_, s.singles = singles_;
  s.of = table_->device.as<const StateRows>();
  s.sequence_of = reinterpret_cast<const int32_t*>(s.of + sequences_);
  s.in = in, s.betas = betas, s.out = out;
  s.slots = slots_.as<float>() + layer.at, s.slot_stride = slot_floats_;
  s.conv = layer.conv.as<float>(), s.decay = layer.decay.as<float>(), s.bias = layer.bias.as<float>();
  s.norm = layer.norm, s.eps = layer.eps;
  s.mixed = mixed_.get(), s.fades = fades_.as<float2>(), s.had = had_.as<float>();
  return s;
}

Status LinearLayers::run(int32_t id, const float* in, const float* betas, void* out) {
  const DeltaStep s = step(id, in, betas, out);
  launch_convolution(s, stream_);
  launch_delta_rule(s, stream_);
  launch_gated_norm(s, stream_);
  return check(cudaGetLastError(), "linear attention");
}

}  // namespace kvasir::model::cuda
