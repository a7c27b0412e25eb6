#include "kvcache/quant.h"

#include <cstring>

namespace kvasir::kvcache {
namespace {

uint8_t* bytes_at(void* base, DType type, int64_t element) {
  return static_cast<uint8_t*>(base) + dtype_bytes(type, element);
}

int read_int4(const uint8_t* q, int i) {
  int nibble = i & 1 ? q[i / 2] >> 4 : q[i / 2] & 15;
  return nibble >= 8 ? nibble - 16 : nibble;
}

void store_groups(const CacheView& c, const float* row, uint8_t* q, void* scales) {
  const int group = c.quant_group, limit = quant_max(c.dtype);
  for (int g = 0; g < c.head_dim / group; ++g, row += group) {
    float absmax = 0;
    for (int i = 0; i < group; ++i) absmax = std::fabs(row[i]) > absmax ? std::fabs(row[i]) : absmax;
    float scale = group_scale(absmax, c.dtype, c.scale_dtype);
    encode(&scale, 1, c.scale_dtype, static_cast<uint8_t*>(scales) + dtype_bytes(c.scale_dtype, g));
    for (int i = 0; i < group; ++i) {
      const int v = round_clamp(row[i] / scale, limit), at = g * group + i;
      if (c.dtype == DType::i8) {
        q[at] = uint8_t(v);
      } else {
        uint8_t& byte = q[at / 2];
        byte = at & 1 ? uint8_t((byte & 0x0f) | ((v & 15) << 4)) : uint8_t(v & 15);
      }
    }
  }
}

void load_groups(const CacheView& c, const uint8_t* q, const void* scales, float* row) {
  const int group = c.quant_group;
  for (int i = 0; i < c.head_dim; ++i) {
    float scale;
    decode(static_cast<const uint8_t*>(scales) + dtype_bytes(c.scale_dtype, i / group), 1, c.scale_dtype, &scale);
    row[i] = float(c.dtype == DType::i8 ? int8_t(q[i]) : read_int4(q, i)) * scale;
  }
}

}  // namespace

void encode(const float* x, int64_t n, DType type, void* out) {
  if (n == 0) return;  // an empty tensor may have no address
  if (type == DType::f32) {
    std::memcpy(out, x, size_t(n) * 4);
  } else if (type == DType::f16) {
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(out)[i] = f32_to_f16(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(out)[i] = f32_to_bf16(x[i]);
  }
}

void decode(const void* in, int64_t n, DType type, float* x) {
  if (n == 0) return;  // an empty tensor may have no address
  if (type == DType::f32) {
    std::memcpy(x, in, size_t(n) * 4);
  } else if (type == DType::f16) {
    for (int64_t i = 0; i < n; ++i) x[i] = f16_to_f32(static_cast<const uint16_t*>(in)[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] = bf16_to_f32(static_cast<const uint16_t*>(in)[i]);
  }
}

void store_row(const CacheView& c, int64_t token, int64_t layer, int64_t head, bool value, const float* row) {
  uint8_t* q = bytes_at(c.data, c.dtype, row_element(c.strides, token, layer, head, value));
  switch (c.quant) {
    case QuantKind::none: return encode(row, c.head_dim, c.dtype, q);
    case QuantKind::group:
      return store_groups(c, row, q,
                          bytes_at(c.scale, c.scale_dtype, row_element(c.scale_strides, token, layer, head, value)));
    case QuantKind::per_tensor: {
      float inverse = 1.0f / (value ? c.v_scale : c.k_scale);
      for (int i = 0; i < c.head_dim; ++i)
        q[i] = c.dtype == DType::i8 ? uint8_t(round_clamp(row[i] * inverse, 127)) : f32_to_e4m3(row[i] * inverse);
    }
  }
}

void load_row(const CacheView& c, int64_t token, int64_t layer, int64_t head, bool value, float* row) {
  const uint8_t* q = bytes_at(c.data, c.dtype, row_element(c.strides, token, layer, head, value));
  switch (c.quant) {
    case QuantKind::none: return decode(q, c.head_dim, c.dtype, row);
    case QuantKind::group:
      return load_groups(
          c, q, bytes_at(c.scale, c.scale_dtype, row_element(c.scale_strides, token, layer, head, value)), row);
    case QuantKind::per_tensor: {
      float scale = value ? c.v_scale : c.k_scale;
      for (int i = 0; i < c.head_dim; ++i)
        row[i] = (c.dtype == DType::i8 ? float(int8_t(q[i])) : e4m3_to_f32(q[i])) * scale;
    }
  }
}

}  // namespace kvasir::kvcache
