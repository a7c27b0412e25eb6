"""Number formats as the contract stores them: bfloat16, FP8 E4M3, packed int4, and the cache's quantization (section 5)."""
import numpy as np

f32 = np.float32
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "float8_e4m3": np.uint8, "int8": np.int8, "int4": np.uint8}


def bfloat16(x):
    """float32 to the nearest bfloat16's 16 bits, ties to even."""
    bits = np.asarray(x, f32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(np.asarray(x, f32)), np.uint16(0x7FC0), rounded)


def _e4m3_table():
    values = []
    for code in range(127):  # 127 is NaN
        exponent, fraction = code >> 3, code & 7
        values.append((fraction / 8) * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


E4M3 = _e4m3_table()


def e4m3(x):
    """To the nearest E4M3 code, ties to even, saturating at 448; NaN stays NaN."""
    x = np.asarray(x, np.float64)
    size = np.minimum(np.abs(np.nan_to_num(x, nan=0.0, posinf=448, neginf=-448)), 448.0)
    above = np.clip(np.searchsorted(E4M3, size), 1, 126)
    below = above - 1
    to_above, to_below = E4M3[above] - size, size - E4M3[below]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    code = np.where(np.isnan(x), 127, code)
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def from_e4m3(code):
    size = np.append(E4M3, np.nan)[np.asarray(code) & 127]
    return np.where(np.asarray(code) & 128, -size, size)


def pack4(q):
    """Even index in the low nibble, two's complement."""
    q = np.asarray(q, np.int64)
    return ((q[..., 0::2] & 15) | ((q[..., 1::2] & 15) << 4)).astype(np.uint8)


def unpack4(packed):
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1]).astype(np.int64)
    return np.where(nibbles > 7, nibbles - 16, nibbles)


def encode(x, dtype):
    """Float values as a tensor of this type, as it lies in its file."""
    if dtype == "bfloat16":
        return bfloat16(x)
    if dtype == "float8_e4m3":
        return e4m3(x)
    return np.asarray(x, f32).astype(STORED[dtype])


def decode(stored, dtype):
    """A tensor's values, exactly, as float64."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(f32).astype(np.float64)
    if dtype == "float8_e4m3":
        return from_e4m3(stored)
    if dtype == "int4":
        return unpack4(stored).astype(np.float64)
    return stored.astype(np.float64)


class Codec:
    """What the cache does to K (kv 0) and V (kv 1): float32 arithmetic with IEEE division."""

    def __init__(self, cache_dtype, quant_bit, group, scale_dtype, k_scale, v_scale):
        self.dtype, self.bit, self.group, self.scale_dtype = cache_dtype, quant_bit, group, scale_dtype
        self.scale = (f32(k_scale), f32(v_scale))

    def store(self, x, kv):
        """Values [..., D] to (stored elements, group scales or None)."""
        x = np.asarray(x, f32)
        if self.bit:
            most = f32(127 if self.bit == 8 else 7)
            groups = x.reshape(*x.shape[:-1], x.shape[-1] // self.group, self.group)
            scale = np.maximum(np.abs(groups).max(-1) / most, f32(1e-5))
            if self.scale_dtype == "float16":
                scale = np.minimum(scale, f32(65504)).astype(np.float16)
            q = np.clip(np.rint(groups / scale.astype(f32)[..., None]), -most, most).reshape(x.shape)
            return (q.astype(np.int8) if self.bit == 8 else pack4(q)), scale
        if self.dtype in ("int8", "float8_e4m3"):
            y = x * (f32(1) / self.scale[kv])
            return (np.clip(np.rint(y), -127, 127).astype(np.int8) if self.dtype == "int8" else e4m3(y)), None
        return encode(x, self.dtype), None

    def load(self, stored, scale, kv):
        """Stored elements back to float32 values."""
        values = decode(stored, self.dtype).astype(f32)
        if self.bit:
            groups = values.reshape(*values.shape[:-1], values.shape[-1] // self.group, self.group)
            return (groups * scale.astype(f32)[..., None]).reshape(values.shape)
        return values * self.scale[kv] if self.dtype in ("int8", "float8_e4m3") else values
