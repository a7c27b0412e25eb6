#include "model/formats/dummy.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "core/cat.h"
#include "core/check.h"
#include "core/dtype.h"
#include "model/arch/registry.h"
#include "model/formats/dummy_shapes.h"
#include "model/philox.h"

namespace kvasir::model {
namespace {

constexpr WeightType kTypes[] = {WeightType::f32,  WeightType::f16,   WeightType::bf16,
                                 WeightType::q4_0, WeightType::q4_1,  WeightType::q8_0,
                                 WeightType::q4_k, WeightType::mxfp4, WeightType::int4};
constexpr const char* kTypeNames = "f32, f16, bf16, q4_0, q4_1, q8_0, q4_k, mxfp4 or int4";

// A device makes the others itself.
bool host_only(WeightType type) { return type == WeightType::q4_k || type == WeightType::mxfp4; }

const WeightType* find_type(std::string_view name) {
  for (const WeightType& t : kTypes) {
    std::string_view known = type_info(t)->name;
    if (name.size() == known.size() &&
        std::equal(name.begin(), name.end(), known.begin(), [](char a, char b) { return (a & ~32) == (b & ~32); }))
      return &t;
  }
  return nullptr;
}

template <class T>
void put(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

struct Counts {
  int64_t experts = 0, others = 0;
};
// Of a layer's attention.
int64_t attention_parameters(const ModelConfig& c, int32_t layer) {
  const int64_t hidden = c.hidden, heads = c.heads;
  if (const LinearConfig& l = c.linear; c.is_linear(layer))
    return (l.channels() + 2 * l.values() + 2 * l.value_heads) * hidden;
  if (!c.latent.on()) return ((c.gated_attention ? 3 : 2) * heads + 2 * c.kv_heads) * c.head_dim * hidden;
  const LatentConfig& l = c.latent;
  const int64_t q = heads * (l.nope + l.rope);
  return (l.query_rank > 0 ? l.query_rank * (hidden + q) : q * hidden) + (l.rank + l.rope) * hidden +
         heads * (l.rank * (l.nope + l.value) + l.value * hidden);
}
Counts parameters_of(const ModelConfig& c) {
  const int64_t hidden = c.hidden;
  Counts out{0, c.vocab * hidden};
  for (int32_t i = 0; i < c.layers; ++i) {
    const bool experts = c.experts.in_layer(i);
    out.others += attention_parameters(c, i) + (c.gated ? 3 : 2) * (experts ? c.experts.shared_ffn : c.ffn) * hidden;
    if (!experts) continue;
    out.others += c.experts.routing.experts * hidden;
    out.experts += 3 * int64_t(c.experts.ffn) * c.experts.routing.experts * hidden;
  }
  return out;
}

class DummyWeights final : public Weights {
 public:
  explicit DummyWeights(const ModelConfig& c)
      : config_(c),
        seed_(c.dummy_seed),
        type_(*find_type(c.quantization)),
        expert_type_(c.dummy_expert_type.empty() ? type_ : *find_type(c.dummy_expert_type)) {}

  bool has(std::string_view) const override { return false; }  // nothing fused, and a tied head

  Result<HostTensor> get(std::string_view name, int64_t rows, int64_t cols) override {
    const bool plain = rows == 1 || name.ends_with(".ffn_gate_inp.weight") ||  // routers, as files have them
                       name.ends_with(".ssm_conv1d.weight");
    const bool expert = std::count(name.begin(), name.end(), '.') == 4;  // blk.3.ffn_up.17.weight
    HostTensor t{std::string(name), plain ? WeightType::f32 : expert ? expert_type_ : type_, rows, cols, nullptr, 0};
    const TypeInfo& info = *type_info(t.type);
    t.bytes = rows * cols / info.block * info.bytes;
    if (t.type == WeightType::int4) t.group = cols;  // one scale for all: wider than AWQ's and GPTQ's groups
    // Biases are read by the host, and T5's tables of them are made longer there.
    const bool by_host = name.ends_with(".bias") || name.ends_with(".ssm_conv1d.weight") ||
                         name.find("attn_rel_b") != std::string_view::npos;
    if (leave_seeded_ && rows > 1 && !host_only(t.type) && !by_host) {
      t.seeded = seeded(t);
      if (live_.emplace(t.name, nullptr).second) parameters_ += rows * cols, bytes_ += t.bytes;
      return t;
    }
    auto memory = std::make_unique<uint8_t[]>(size_t(t.bytes));
    t.data = memory.get();
    if (rows == 1) {
      for (int64_t i = 0; i < cols; ++i) put(memory.get() + 4 * i, name.ends_with(".bias") ? 0.0f : 1.0f);
    } else {
      fill(t, memory.get());
    }
    const auto [at, fresh] = live_.try_emplace(t.name);
    at->second = std::move(memory);
    if (fresh) parameters_ += rows * cols, bytes_ += t.bytes;
    return t;
  }
  void release(const HostTensor& tensor) override { live_[tensor.name].reset(); }
  void leave_seeded() override { leave_seeded_ = true; }
  // Before anybody has asked for them, of the matrices that will be asked for.
  int64_t parameters() const override {
    const Counts all = parameters_of(config_);
    return parameters_ > 0 ? parameters_ : all.experts + all.others;
  }
  int64_t bytes() const override {
    const Counts all = parameters_of(config_);
    auto size = [](int64_t n, const TypeInfo& t) { return n / t.block * t.bytes; };
    return bytes_ > 0 ? bytes_ : size(all.experts, *type_info(expert_type_)) + size(all.others, *type_info(type_));
  }
  std::vector<HostTensor> tensors() const override { return {}; }  // they are made when asked for

 private:
  Seeded seeded(const HostTensor& t) const {
    uint64_t hash = 14695981039346656037ull;  // FNV-1a of the name: tensors differ
    for (char c : t.name) hash = (hash ^ uint8_t(c)) * 1099511628211ull;
    // Uniform weights of variance 1/cols keep the activations near 1.
    return {seed_, hash, std::sqrt(3.0f / float(t.cols))};
  }
  // model/cuda/seeded.cu makes the same.
  void fill(const HostTensor& t, uint8_t* out) const {
    const Seeded from = seeded(t);
    const float spread = from.spread;
    uint64_t counter = 0;
    std::array<uint32_t, 4> random{};
    int left = 0;
    auto next = [&] {
      if (left == 0) {
        random =
            philox({uint32_t(counter), uint32_t(counter >> 32), uint32_t(from.stream), uint32_t(from.stream >> 32)},
                   {uint32_t(from.seed), uint32_t(from.seed >> 32)});
        ++counter, left = 4;
      }
      return random[size_t(--left)];
    };
    const TypeInfo& info = *type_info(t.type);
    for (int64_t i = 0; i < t.bytes; i += info.bytes) {
      uint8_t* p = out + i;
      auto value = [&] { return (float(int32_t(next() >> 8) - (1 << 23)) + 0.5f) * 0x1p-23f * spread; };
      switch (t.type) {
        case WeightType::f32: put(p, value()); break;
        case WeightType::f16: put(p, f32_to_f16(value())); break;
        case WeightType::bf16: put(p, f32_to_bf16(value())); break;
        case WeightType::mxfp4:
          *p = uint8_t(125 + std::ilogb(spread));
          for (int j = 1; j < info.bytes; j += 4) put(p + j, next());
          break;
        case WeightType::q4_k: {  // all its scales and minima are 32 of 63
          put(p, f32_to_f16(spread / 256)), put(p + 2, f32_to_f16(spread / 256 * 7.5f));
          std::memset(p + 4, 160, 8), std::memset(p + 12, 0, 4);
          for (int j = 16; j < info.bytes; j += 4) put(p + j, next());
          break;
        }
        case WeightType::int4: {
          const float d = f16_to_f32(f32_to_f16(spread / 8));
          put(p, d), put(p + 4, -8 * d);
          for (int j = 8; j < info.bytes; j += 4) put(p + j, next());
          break;
        }
        default: {
          float step = t.type == WeightType::q8_0 ? spread / 127 : spread / 8;
          put(p, f32_to_f16(step));
          if (t.type == WeightType::q4_1) put(p + 2, f32_to_f16(-7.5f * step));
          int first = t.type == WeightType::q4_1 ? 4 : 2;
          for (int j = first; j < info.bytes; j += 4) put(p + j, next());
        }
      }
    }
  }

  ModelConfig config_;
  uint64_t seed_;
  WeightType type_, expert_type_;
  bool leave_seeded_ = false;
  std::map<std::string, std::unique_ptr<uint8_t[]>> live_;
  int64_t parameters_ = 0, bytes_ = 0;
};

// GPT-2's way to write bytes as printable characters.
std::string byte_token(int b) {
  auto printable = [](int c) { return (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255); };
  int code = b;
  if (!printable(b)) {
    code = 256;
    for (int c = 0; c < b; ++c) code += !printable(c);
  }
  if (code < 128) return std::string(1, char(code));
  return {char(0xc0 | (code >> 6)), char(0x80 | (code & 63))};
}

constexpr const char* kTemplate =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

Status bad_value(std::string_view key, std::string_view value, const std::string& want) {
  return invalid_argument(cat("dummy model: ", key, " is ", value, "; it must be ", want)).with_field("model");
}

// What a spec says, item by item.
struct DummySpec {
  ModelConfig config;
  WeightType type = WeightType::q8_0;
  std::optional<WeightType> expert_type;

  bool has_experts() const { return config.experts.routing.experts > 0; }
  Status read(std::string_view key, std::string_view value);

 private:
  int32_t* whole_number(std::string_view key);
  Status read_type(std::string_view key, std::string_view value);
};

// Where the number of a key goes; null where it has no such number.
int32_t* DummySpec::whole_number(std::string_view key) {
  struct Field {
    std::string_view name;
    int32_t* value;
  };
  ModelConfig& c = config;
  for (const Field& f : {Field{"layers", &c.layers}, Field{"hidden", &c.hidden}, Field{"ffn", &c.ffn},
                         Field{"heads", &c.heads}, Field{"kv_heads", &c.kv_heads}, Field{"head_dim", &c.head_dim},
                         Field{"vocab", &c.vocab}, Field{"context", &c.context}, Field{"window", &c.window}})
    if (f.name == key) return f.value;
  if (!has_experts()) return nullptr;
  Routing& routing = c.experts.routing;
  for (const Field& f : {Field{"experts", &routing.experts}, Field{"experts_used", &routing.used},
                         Field{"expert_ffn", &c.experts.ffn}, Field{"shared_ffn", &c.experts.shared_ffn}})
    if (f.name == key) return f.value;
  return nullptr;
}

Status DummySpec::read_type(std::string_view key, std::string_view value) {
  const WeightType* t = find_type(value);
  if (!t) return bad_value(key, value, kTypeNames);
  if (key == "type")
    type = *t;
  else
    expert_type = *t;
  return {};
}

Status DummySpec::read(std::string_view key, std::string_view value) {
  auto number = [&](auto* out, const char* want = "a whole number") -> Status {
    auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *out);
    if (error != std::errc() || end != value.data() + value.size()) return bad_value(key, value, want);
    return {};
  };
  if (int32_t* field = whole_number(key)) {
    KVASIR_TRY(number(field));
    return *field < 0 ? bad_value(key, value, "a whole number") : Status();
  }
  if (key == "seed") return number(&config.dummy_seed);
  if (key == "step_ms") return number(&config.step_ms, "a number of milliseconds");
  if (key == "lost_rank") return number(&config.dummy_lost_rank);
  if (key == "hung_rank") return number(&config.dummy_hung_rank);
  if (key == "lost_step") return number(&config.dummy_lost_step);
  if (key == "type" || (key == "expert_type" && has_experts())) return read_type(key, value);
  if (key == "name") {
    config.name = value;
    return {};
  }
  return bad_value(key, value,
                   cat("left out: the keys are layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context, ",
                       "window, seed, step_ms, lost_rank, hung_rank, lost_step, type and name",
                       has_experts() ? ", and experts, experts_used, expert_ffn, shared_ffn and expert_type" : ""));
}

// What a spec leaves out.
void fill_in(ModelConfig& c) {
  if (c.head_dim == 0) c.head_dim = c.heads > 0 ? std::max(2, c.hidden / c.heads) : 64;
  if (c.heads == 0) c.heads = std::max(1, c.hidden / c.head_dim);
  if (c.kv_heads == 0) c.kv_heads = c.heads % 2 == 0 && !c.encoder ? c.heads / 2 : c.heads;
  if (c.ffn == 0) c.ffn = 2 * c.hidden;
  if (c.experts.routing.experts > 0 && c.experts.ffn == 0) c.experts.ffn = std::max(32, c.hidden / 64 * 32);
  if (!c.experts.dense.empty()) c.experts.dense.resize(size_t(std::clamp(c.layers, 0, 1024)), false);
}

// Rows are whole blocks of their type.
Status check_blocks(std::string_view key, WeightType t, std::initializer_list<int64_t> widths) {
  for (int64_t cols : widths)
    if (cols % type_info(t)->block != 0)
      return bad_value(key, type_info(t)->name,
                       cat("one whose blocks a row of ", cols, " is a multiple of; f32, f16 and bf16 are"));
  return {};
}

}  // namespace

Result<ModelConfig> config_from_dummy(std::string_view rest) {
  DummySpec spec;
  ModelConfig& c = spec.config;
  c.name = "dummy";
  c.layers = 2, c.hidden = 256, c.vocab = 512, c.context = 2048;
  size_t comma = rest.find(',');
  const DummyShape* shape = find_dummy_shape(rest.substr(0, comma));
  c.architecture = shape ? shape->architecture : rest.substr(0, comma);
  const Architecture* a = find_architecture(c.architecture);
  if (a && a->family) a->family(c);
  if (shape) shape->apply(c);
  while (comma != std::string_view::npos) {
    rest.remove_prefix(comma + 1);
    comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma), key = item.substr(0, item.find('='));
    if (key.size() == item.size()) return bad_value(item, "missing", "written as key=value");
    KVASIR_TRY(spec.read(key, item.substr(key.size() + 1)));
  }
  fill_in(c);
  if (c.vocab < kDummyMinVocab) return bad_value("vocab", cat(c.vocab), cat("at least ", kDummyMinVocab));
  c.rope.rotary_dim = c.head_dim;
  if (a && a->derive) a->derive(c);
  KVASIR_TRY(c.validate());
  const ExpertsConfig& experts = c.experts;
  const bool dense = !spec.has_experts() || std::count(experts.dense.begin(), experts.dense.end(), true) > 0;
  KVASIR_TRY(
      check_blocks("type", spec.type,
                   {c.hidden, dense ? c.ffn : 0, int64_t(c.heads) * (c.latent.on() ? c.latent.value : c.head_dim),
                    experts.shared_ffn, c.latent.rank, c.latent.nope, c.latent.query_rank}));
  if (spec.has_experts())
    KVASIR_TRY(check_blocks(spec.expert_type ? "expert_type" : "type", spec.expert_type.value_or(spec.type),
                            {c.hidden, experts.ffn}));
  if (spec.expert_type) c.dummy_expert_type = type_info(*spec.expert_type)->name;
  c.quantization = type_info(spec.type)->name;
  return std::move(spec.config);
}

std::unique_ptr<Weights> dummy_weights(const ModelConfig& config) { return std::make_unique<DummyWeights>(config); }

text::GgufVocab dummy_vocab(const ModelConfig& config) {
  text::GgufVocab v;
  v.model = "gpt2";
  v.pre = "gpt-2";
  for (int b = 0; b < 256; ++b) v.tokens.push_back(byte_token(b));
  for (const char* special : {"<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"}) v.tokens.push_back(special);
  v.types.assign(256, 1);
  v.types.insert(v.types.end(), 4, 3);
  for (int32_t i = kDummyMinVocab; i < config.vocab; ++i) v.tokens.push_back(cat(byte_token(' '), "w", i));
  v.types.resize(size_t(config.vocab), 1);
  // A byte-level vocabulary comes with merges; this one joins two words that no text ever becomes.
  if (int32_t last = config.vocab - 1; last >= kDummyMinVocab + 2) {
    v.tokens[size_t(last)] = v.tokens[size_t(last - 2)] + v.tokens[size_t(last - 1)];
    v.merges.push_back(v.tokens[size_t(last - 2)] + " " + v.tokens[size_t(last - 1)]);
  }
  v.bos = 256, v.eos = 257, v.eot = 259;
  v.chat_template = kTemplate;
  return v;
}

}  // namespace kvasir::model
