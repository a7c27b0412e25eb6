"""Is what an operator wrote what the contract asks for (section 9)? Differences as sentences; none means yes."""
import numpy as np

import formats

BOUND = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3": 6e-2}


def order(codes, dtype):
    """Stored elements as integers that count representable values, so that neighbours differ by one."""
    if dtype == "int4":
        return formats.unpack4(codes)
    if dtype == "int8":
        return codes.astype(np.int64)
    bits = codes.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[codes.itemsize]).astype(np.int64)
    sign = 1 << (8 * codes.itemsize - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def bytes_of(x):
    return np.ascontiguousarray(x).view(np.uint8)


def check_stored(name, got, want, touched, dtype, near, slack=None):
    """Bytes as wanted; where `near`, written elements may be a step away, or within `slack` of their value."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name} is {got.dtype} {got.shape}, not {want.dtype} {want.shape}"]
    same = (bytes_of(got) == bytes_of(want)).reshape(*got.shape, -1).all(-1)
    if not same[~touched].all():
        return [f"{name}: {np.sum(~same & ~touched)} elements changed that the call does not write"]
    wrong = touched & ~same
    if near:
        step = np.abs(order(got, dtype) - order(want, dtype))
        ok = (step.reshape(*got.shape, -1) <= 1).all(-1)
        if slack is not None and dtype not in ("int8", "int4"):
            ok |= np.abs(formats.decode(got, dtype) - formats.decode(want, dtype)) <= slack
        wrong &= ~ok
    if wrong.any():
        at = tuple(int(x[0]) for x in np.nonzero(wrong))
        return [f"{name}: {wrong.sum()} of {touched.sum()} written elements differ, first at {at}: {got[at]} and not {want[at]}"]
    return []


def check_rows(name, got, want, bound):
    """Each last-axis row within bound of the wanted row's 2-norm, and exact zeros where it is zero."""
    if got.shape != want.shape:
        return [f"{name} has shape {got.shape}, not {want.shape}"]
    if not want.size:
        return []
    off = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    size = np.linalg.norm(want, axis=-1)
    wrong = ~(off <= bound * size)
    if wrong.any():
        at = np.unravel_index(np.nanargmax(np.where(wrong, off / np.maximum(size, 1e-30), -1)), wrong.shape)
        return [f"{name}: {wrong.sum()} of {wrong.size} rows are wrong, worst {tuple(map(int, at))}: off by {off[at]:.3g} of {size[at]:.3g}"]
    return []


def compare(oracle, result):
    a, found = oracle.a, []
    cache = scale = None
    if oracle.op != "MultiHeadAttention":
        cache, scale = oracle.append()
        near = (bool(a["rope"]) and not oracle.streaming) or "qkv_bias" in oracle.tensors
        slack = 1e-6 * max((np.abs(x).max() for x in (oracle.k, oracle.v) if x is not None and x.size), default=0) if near else None
        found += check_stored("cache", result["cache"], cache, oracle.touched, oracle.codec.dtype, near, slack)
        if scale is not None:
            found += check_stored("scale", result["scale"], scale, oracle.touched_scale, scale.dtype.name, near, slack)
        if found:
            return found
        cache, scale = result["cache"], result.get("scale")  # attention is held to what lies there
    if oracle.op == "KeyValueCache":
        for name, want in zip(("key", "value"), oracle.packed(cache, scale)):
            found += check_rows(name, result[name], want, 0.0)
        return found
    out, lse = oracle.attend(cache, scale)
    bound = BOUND[oracle.io]
    if a["cyclic_capacity"] and a["rope"] and not oracle.streaming and oracle.codec.dtype != "float32":
        bound = max(bound, 3e-2)  # K that did not survive may be a step away, and cannot be seen
    if a["out_dtype"] == "float8_e4m3":
        step = np.abs(order(result["attn_output"], "float8_e4m3") - order(formats.e4m3(out / a["out_scale"]), "float8_e4m3"))
        if step.size and step.max() > 1:
            found.append(f"attn_output: {np.sum(step > 1)} elements are more than one E4M3 step off, most {step.max()}")
    else:
        found += check_rows("attn_output", result["attn_output"], out, bound)
    if a["return_lse"]:
        got = result["lse"]
        both = np.isneginf(lse) & np.isneginf(got)
        wrong = ~(both | (np.abs(np.where(both, 0, got - np.where(both, 0, lse))) <= bound * np.maximum(1, np.abs(lse))))
        if wrong.any():
            at = tuple(int(x[0]) for x in np.nonzero(wrong))
            found.append(f"lse: {wrong.sum()} of {wrong.size} differ, first at {at}: {got[at]} and not {lse[at]}")
    return found
