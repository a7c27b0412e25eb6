"""Stored cases that are wrong in one way each: `kvasir op` must refuse every one with exit code 2 and a sentence that names
what is wrong, on every back end, and write nothing.

  broken.py KVASIR [--backend reference,cpu] [--verbose]"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from drive import np  # or the test is skipped
import cases

I64 = np.int64


def sound():
    """Sequences of 5 old and 1 new token, 3 and 2, 0 and 4, in pages of 4; int8 in groups of 8."""
    rng = np.random.default_rng(5)
    case = dict(op="MultiHeadCacheAttention", revision=2, io_dtype="float32",
                attributes=dict(num_heads=4, num_kv_heads=2, head_dim=16, is_causal=True, num_layer=2, layer_idx=1, quant_bit=8,
                                quant_group=8, cache_mode=1, page_size=4, return_lse=True),
                scalars=dict(decoding_batches=1, max_seqlen=4, max_kvlen=6))
    t = dict(query=rng.standard_normal((7, 4, 16)), current_key=rng.standard_normal((7, 2, 16)),
             current_value=rng.standard_normal((7, 2, 16)), scale=np.full((24, 2, 2, 2, 2), 0.01))
    t = {k: v.astype(np.float32) for k, v in t.items()}
    t |= dict(seqstarts=np.array([0, 1, 3, 7]), kvstarts=np.array([0, 6, 11, 15]), start_pos=np.array([5, 3, 0]),
              cachestarts=np.array([[0, 4], [8, 12], [16, -1]]), cache=np.zeros((24, 2, 2, 2, 16), np.int8))
    return case, t


def plain(case, t):
    """The same without quantization."""
    for key in ("quant_bit", "quant_group"):
        case["attributes"].pop(key)
    t.pop("scale")
    t["cache"] = t["cache"].astype(np.float32)


def attribute(name, value):
    return lambda c, t: c["attributes"].__setitem__(name, value)


def scalar(name, value):
    return lambda c, t: c["scalars"].__setitem__(name, value)


def head(name, value):
    return lambda c, t: c.__setitem__(name, value)


def tensor(name, value):
    return lambda c, t: t.__setitem__(name, np.asarray(value))


def at(name, index, value):
    return lambda c, t: t[name].__setitem__(index, value)


def gone(name):
    return lambda c, t: t.pop(name)


def both(*steps):
    return lambda c, t: [s(c, t) for s in steps]


def cast(name, kind):
    return lambda c, t: t.__setitem__(name, t[name].astype(kind))


def cut(name, *slices):
    return lambda c, t: t.__setitem__(name, t[name][slices])


NAN, INF = float("nan"), float("inf")
# What it is, words that the message must have, and what breaks the sound case.
VALUES = [
    ("query of one head fewer", ["query", "(7, 3, 16)", "(7, 4, 16)"], cut("query", slice(None), slice(3))),
    ("query of two dimensions", ["query", "(7, 64)"], lambda c, t: t.__setitem__("query", t["query"].reshape(7, 64))),
    ("key of one token fewer", ["current_key", "(6, 2, 16)", "(7, 2, 16)"], cut("current_key", slice(6))),
    ("value of more heads", ["current_value", "(7, 4, 16)"], tensor("current_value", np.zeros((7, 4, 16), np.float32))),
    ("seqstarts of two dimensions", ["seqstarts"], tensor("seqstarts", np.array([[0, 1, 3, 7]]))),
    ("seqstarts empty", ["seqstarts"], tensor("seqstarts", np.zeros(0, I64))),
    ("seqstarts int32", ["seqstarts", "i4"], cast("seqstarts", np.int32)),
    ("seqstarts from 1", ["seqstarts"], at("seqstarts", 0, 1)),
    ("seqstarts falling", ["seqstarts"], at("seqstarts", 1, 4)),
    ("seqstarts huge", [str(2**62)], at("seqstarts", 3, 2**62)),
    ("kvstarts falling", ["kvstarts"], at("kvstarts", 1, 12)),
    ("kvstarts of another length", ["kvstarts", "3", "4"], cut("kvstarts", slice(3))),
    ("kvstarts huge", ["sequence 2", "kvlen"], at("kvstarts", 3, 2**62)),
    ("kvlen is not start_pos + seqlen", ["kvlen", "sequence 1"], at("start_pos", 1, 2)),
    ("start_pos negative", ["start_pos", "-1"], at("start_pos", 2, -1)),
    ("start_pos short", ["start_pos"], cut("start_pos", slice(2))),
    ("start_pos near the end of int64", ["start_pos"], at("start_pos", 0, 2**63 - 1)),
    ("a page beyond the cache", ["cachestarts[1, 1]", "24"], at("cachestarts", (1, 1), 24)),
    ("a page before the cache", ["cachestarts", "-4"], at("cachestarts", (0, 0), -4)),
    ("a page that ends beyond the cache", ["cachestarts", "22"], at("cachestarts", (0, 0), 22)),
    ("a page at 2^62", ["cachestarts"], at("cachestarts", (0, 0), 2**62)),
    ("two sequences write one slot", ["sequences 0 and 2", "slot 5"], at("cachestarts", (2, 0), 4)),
    ("one sequence writes one slot twice", ["sequences 1 and 1", "slot 11"], both(attribute("page_size", 1), tensor("cachestarts", [[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 11, -1], [16, 17, 18, 19, -1, -1]]))),
    ("too few pages", ["cachestarts"], cut("cachestarts", slice(None), slice(1))),
    ("a table of one dimension", ["cachestarts"], tensor("cachestarts", np.zeros(3, I64))),
    ("offset mode with a table", ["cachestarts"], attribute("cache_mode", 0)),
    ("cache of another head size", ["cache", "8"], cut("cache", ..., slice(8))),
    ("cache of another type", ["cache", "f4"], cast("cache", np.float32)),
    ("cache without tokens", ["cache"], cut("cache", slice(0))),
    ("scale of another size", ["scale"], cut("scale", ..., slice(1))),
    ("scale of int8", ["scale"], cast("scale", np.int8)),
    ("scale is not there", ["scale"], gone("scale")),
    ("scale without a quantized cache", ["scale"], both(plain, tensor("scale", np.zeros((24, 2, 2, 2, 2), np.float32)))),
    ("query is not there", ["query"], gone("query")),
    ("cache is not there", ["cache"], gone("cache")),
    ("kvstarts is not there", ["kvstarts"], gone("kvstarts")),
    ("a tensor of no name we know", ["attn_msk"], tensor("attn_msk", np.zeros((7, 15), np.float32))),
    ("mask too narrow", ["attn_mask", "14"], tensor("attn_mask", np.zeros((7, 14), np.float32))),
    ("mask of too few heads", ["attn_mask"], tensor("attn_mask", np.zeros((3, 7, 15), np.float32))),
    ("mask of another type", ["attn_mask"], tensor("attn_mask", np.zeros((7, 15), np.float16))),
    ("sink_logits of another size", ["sink_logits"], tensor("sink_logits", np.zeros(3, np.float32))),
    ("sink_logits NaN", ["sink_logits", "NaN"], tensor("sink_logits", np.full(4, np.nan, np.float32))),
    ("relative_bias of an even number", ["relative_bias"], tensor("relative_bias", np.zeros((4, 2), np.float32))),
    ("relative_bias Inf", ["relative_bias"], tensor("relative_bias", np.full((4, 1), np.inf, np.float32))),
    ("alibi_slopes without ALiBi", ["alibi_slopes"], tensor("alibi_slopes", np.zeros(4, np.float32))),
    ("alibi_slopes NaN", ["alibi_slopes"], both(attribute("is_alibi", True), tensor("alibi_slopes", np.full(4, np.nan, np.float32)))),
    ("a beam of two tokens", ["sequence 1", "beam"], tensor("cache_indirection", np.zeros((1, 3, 6), np.int32))),
    ("beams that do not divide", ["cache_indirection"], tensor("cache_indirection", np.zeros((2, 2, 6), np.int32))),
    ("bias without packed input", ["qkv_bias"], tensor("qkv_bias", np.zeros(128, np.float32))),
    ("packed input as three tensors", ["qkv"], attribute("packed_qkv", True)),
    ("decoding_batches above B", ["decoding_batches", "4", "3"], scalar("decoding_batches", 4)),
    ("decoding_batches negative", ["decoding_batches", "-1"], scalar("decoding_batches", -1)),
    ("max_seqlen too small", ["max_seqlen", "3", "4"], scalar("max_seqlen", 3)),
    ("max_kvlen too small", ["max_kvlen", "5", "6"], scalar("max_kvlen", 5)),
    ("max_seqlen -1", ["max_seqlen", "-1"], scalar("max_seqlen", -1)),
    ("max_kvlen huge", ["max_kvlen"], scalar("max_kvlen", 2**62)),
    ("max_seqlen beyond int64", ["max_seqlen"], scalar("max_seqlen", 2**64)),
    ("a scalar as text", ["max_kvlen"], scalar("max_kvlen", "6")),
    ("a scalar as a fraction", ["max_kvlen"], scalar("max_kvlen", 6.5)),
    ("an unknown scalar", ["max_len"], scalar("max_len", 6)),
    ("num_heads 0", ["num_heads", "0"], attribute("num_heads", 0)),
    ("num_heads negative", ["num_heads", "-4"], attribute("num_heads", -4)),
    ("num_heads not a multiple", ["num_heads", "3", "2"], attribute("num_heads", 3)),
    ("num_heads as text", ["num_heads"], attribute("num_heads", "4")),
    ("num_heads beyond int32", ["num_heads"], attribute("num_heads", 2**40)),
    ("head_dim 0", ["head_dim", "0"], attribute("head_dim", 0)),
    ("head_dim null", ["head_dim"], attribute("head_dim", None)),
    ("head_dim is no multiple of quant_group", ["quant_group", "32"], attribute("quant_group", 32)),
    ("scales of groups of 8 for groups of 4", ["scale", "2, 2)", "2, 4)"], attribute("quant_group", 4)),
    ("quant_group 0", ["quant_group", "0"], attribute("quant_group", 0)),
    ("quant_group 12", ["quant_group", "12"], attribute("quant_group", 12)),
    ("quant_bit 3", ["quant_bit", "3"], attribute("quant_bit", 3)),
    ("int4 of an odd head size", ["head_dim", "15"], both(attribute("head_dim", 15), attribute("quant_bit", 4), attribute("quant_group", 15), *(cut(n, ..., slice(15)) for n in ("query", "current_key", "current_value")), tensor("cache", np.zeros((24, 2, 2, 2, 7), np.uint8)), cut("scale", ..., slice(1)))),
    ("page_size 0", ["page_size", "0"], attribute("page_size", 0)),
    ("page_size 65537", ["page_size", "65537"], attribute("page_size", 65537)),
    ("cache_mode 2", ["cache_mode", "2"], attribute("cache_mode", 2)),
    ("cache_layout 4", ["cache_layout", "4"], attribute("cache_layout", 4)),
    ("cache_layout negative", ["cache_layout", "-1"], attribute("cache_layout", -1)),
    ("layer_idx beyond", ["layer_idx", "2"], attribute("layer_idx", 2)),
    ("layer_idx negative", ["layer_idx", "-1"], attribute("layer_idx", -1)),
    ("num_layer 0", ["num_layer", "0"], attribute("num_layer", 0)),
    ("k_scale NaN", ["k_scale"], both(plain, attribute("cache_dtype", "float8_e4m3"), cast("cache", np.uint8), attribute("k_scale", NAN))),
    ("v_scale negative", ["v_scale", "-1"], both(plain, attribute("cache_dtype", "int8"), cast("cache", np.int8), attribute("v_scale", -1.0))),
    ("k_scale 0", ["k_scale", "0"], both(plain, attribute("cache_dtype", "int8"), cast("cache", np.int8), attribute("k_scale", 0.0))),
    ("k_scale of a grouped cache", ["k_scale"], attribute("k_scale", 0.5)),
    ("q_scaling 0", ["q_scaling", "0"], attribute("q_scaling", 0.0)),
    ("q_scaling NaN", ["q_scaling"], attribute("q_scaling", NAN)),
    ("q_scaling beyond float32", ["q_scaling"], attribute("q_scaling", 1e300)),
    ("softcap infinite", ["softcap"], attribute("softcap", INF)),
    ("softcap negative", ["softcap", "-1"], attribute("softcap", -1.0)),
    ("window negative", ["window", "-1"], attribute("window", -1)),
    ("window of the sinks alone", ["sinks", "4"], both(attribute("window", 4), attribute("sinks", 4))),
    ("sinks negative", ["sinks", "-1"], both(attribute("window", 4), attribute("sinks", -1))),
    ("cyclic_capacity below window", ["cyclic_capacity", "3"], both(attribute("window", 4), attribute("cyclic_capacity", 3))),
    ("cyclic_capacity without a window", ["cyclic_capacity"], attribute("cyclic_capacity", 8)),
    ("streaming_positions without rope", ["streaming_positions"], attribute("streaming_positions", True)),
    ("out_scale 0", ["out_scale", "0"], both(attribute("out_dtype", "float8_e4m3"), attribute("out_scale", 0.0))),
    ("out_scale of float32", ["out_scale"], attribute("out_scale", 0.5)),
    ("out_dtype int8", ["out_dtype", "int8"], attribute("out_dtype", "int8")),
    ("cache_dtype unknown", ["cache_dtype", "float64"], attribute("cache_dtype", "float64")),
    ("scale_dtype that is not scale's", ["scale"], attribute("scale_dtype", "float16")),
    ("is_causal as a number", ["is_causal"], attribute("is_causal", 1)),
    ("an attribute misspelt", ["is_casual"], attribute("is_casual", True)),
    ("num_repeat of an attention", ["num_repeat"], attribute("num_repeat", 2)),
    ("rope of an odd size", ["rotary_dim", "7"], attribute("rope", dict(style="neox", rotary_dim=7, base=1e4))),
    ("rope beyond the head", ["rotary_dim", "18"], attribute("rope", dict(style="neox", rotary_dim=18, base=1e4))),
    ("rope of no style", ["style", "gpt"], attribute("rope", dict(style="gpt", rotary_dim=8, base=1e4))),
    ("rope base 0", ["base"], attribute("rope", dict(style="neox", rotary_dim=8, base=0))),
    ("rope factor 0", ["factor"], attribute("rope", dict(style="neox", rotary_dim=8, base=1e4, scaling=dict(type="linear", factor=0)))),
    ("rope as text", ["rope"], attribute("rope", "neox")),
    ("an attribute of two lines", ["which is not"], attribute("a\nb\x1b[2J", True)),
    ("revision 3", ["revision", "3"], head("revision", 3)),
    ("io_dtype unknown", ["io_dtype", "float63"], head("io_dtype", "float63")),
    ("op unknown", ["op", "Attention"], head("op", "Attention")),
    ("attributes as a list", ["attributes"], head("attributes", [])),
    ("an unknown member", ["commment"], head("commment", "x")),
    ("input of another type than io_dtype", ["query", "f4"], head("io_dtype", "float16")),
]


def npy(text_header, data=b"", version=b"\x01\x00"):
    padded = text_header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY" + version + len(padded).to_bytes(2, "little") + padded + data


def rewrite(name, change):
    return lambda d: (d / name).write_bytes(change((d / name).read_bytes()))


def replace(name, old, new):
    def change(b):
        assert old in b, old
        return b.replace(old, new, 1)
    return rewrite(name, change)


def header(shape, descr="<f4", order="False", data=b"\0" * 64):
    return lambda b: npy(f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}", data)


def swap(name, make):
    def step(d):
        (d / name).unlink()
        make(d / name)
    return step


def locked(d):
    (d / "query.npy").chmod(0)


FILES = [
    ("query cut short", ["query"], rewrite("query.npy", lambda b: b[:-1])),
    ("query with a byte more", ["query"], rewrite("query.npy", lambda b: b + b"\0")),
    ("query without data", ["query"], rewrite("query.npy", lambda b: b[:128])),
    ("query cut in its header", ["query"], rewrite("query.npy", lambda b: b[:40])),
    ("query empty", ["query"], rewrite("query.npy", lambda b: b"")),
    ("query is no npy", ["query"], rewrite("query.npy", lambda b: b"hello" * 100)),
    ("query of version 9", ["query"], rewrite("query.npy", lambda b: b[:6] + b"\x09" + b[7:])),
    ("a header longer than the file", ["query"], rewrite("query.npy", lambda b: b[:8] + b"\xff\xff" + b[10:])),
    ("a product that overflows", ["query"], rewrite("query.npy", header(f"({2**32}, {2**32}, 4)"))),
    ("a product that overflows to the size", ["query"], rewrite("query.npy", header(f"({2**61}, 2, 16)"))),
    ("a huge dimension", ["query"], rewrite("query.npy", header("(7, 4, 99999999999999999999999)"))),
    ("a negative dimension", ["query"], rewrite("query.npy", header("(-7, -4, 16)"))),
    ("a huge tensor without elements", ["query"], rewrite("query.npy", header(f"({2**62}, 0, {2**62})", data=b""))),
    ("many dimensions", ["query"], rewrite("query.npy", header("(" + "1, " * 30 + ")"))),
    ("fortran order", ["query", "Fortran"], replace("query.npy", b"'fortran_order': False", b"'fortran_order': True ")),
    ("big endian", ["query", ">f4"], replace("query.npy", b"<f4", b">f4")),
    ("float64", ["query"], rewrite("query.npy", header("(7, 4, 16)", "<f8", data=b"\0" * 3584))),
    ("a type that is not UTF-8", ["query"], replace("query.npy", b"<f4", b"\xff\n4")),
    ("objects", ["query"], rewrite("query.npy", header("(7, 4, 16)", "|O"))),
    ("a header of garbage", ["query"], rewrite("query.npy", lambda b: npy("{'descr': (((((((((((("))),
    ("a header without a shape", ["query"], rewrite("query.npy", lambda b: npy("{'descr': '<f4', 'fortran_order': False, }"))),
    ("a folder for a tensor", ["query"], swap("query.npy", lambda p: p.mkdir())),
    ("a link to nothing", ["query"], swap("query.npy", lambda p: p.symlink_to("nowhere"))),
    ("a link to itself", ["query"], swap("query.npy", lambda p: p.symlink_to(p))),
    ("a pipe", ["query"], swap("query.npy", lambda p: os.mkfifo(p))),
    ("an endless device", ["query"], swap("query.npy", lambda p: p.symlink_to("/dev/zero"))),
    ("no case.json", ["case.json"], lambda d: (d / "case.json").unlink()),
    ("case.json a folder", ["case.json"], swap("case.json", lambda p: p.mkdir())),
    ("case.json empty", ["case.json"], rewrite("case.json", lambda b: b"")),
    ("case.json cut short", ["case.json"], rewrite("case.json", lambda b: b[:-2])),
    ("case.json with more behind it", ["case.json"], rewrite("case.json", lambda b: b + b"{}")),
    ("case.json a list", ["case.json"], rewrite("case.json", lambda b: b"[]")),
    ("case.json not UTF-8", ["case.json"], rewrite("case.json", lambda b: b.replace(b"float32", b"float\xff\xfe"))),
    ("case.json nested deeply", ["case.json"], rewrite("case.json", lambda b: b"[" * 200000)),
    ("a member twice", ["revision"], rewrite("case.json", lambda b: b.replace(b'"revision": 2', b'"revision": 2, "revision": 1'))),
    ("an attribute twice", ["num_heads"], rewrite("case.json", lambda b: b.replace(b'"num_heads": 4', b'"num_heads": 4, "num_heads": 2'))),
    ("a number beyond double", ["case.json"], rewrite("case.json", lambda b: b.replace(b'"page_size": 4', b'"page_size": 1e999'))),
]
# Folders for the result that cannot be: where it should go, and what is there.
OUTS = [
    ("a file for the folder", lambda out: out.write_text("")),
    ("a link to nothing there", lambda out: out.symlink_to("nowhere/at/all")),
]
ROOT_READS_ALL = [("an unreadable tensor", ["query"], locked)]


def refused(o, backend, folder, out, words):
    """(what it said, what is wrong with that)."""
    try:
        done = subprocess.run([o.kvasir, "op", folder, "--backend", backend, "--out", out], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "", ["it did not end"]
    said = done.stderr.decode(errors="backslashreplace").rstrip("\n")
    wrong = [] if done.returncode == 2 else [f"exit code {done.returncode}"]
    wrong += [f"'{w}' is missing" for w in words if w not in said]
    if not said.isprintable() or len(said) > 600:
        wrong.append("no line to show anybody")
    if out.is_dir() and any(out.iterdir()):
        wrong.append("it wrote " + ", ".join(f.name for f in out.iterdir()))
    return said[:400], wrong


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvasir")
    p.add_argument("--backend", default="reference,cpu")
    p.add_argument("--verbose", action="store_true")
    o = p.parse_args()
    nothing = lambda *_: None
    todo = [(n, w, f, nothing, nothing) for n, w, f in VALUES]
    todo += [(n, w, nothing, f, nothing) for n, w, f in FILES + (ROOT_READS_ALL if os.geteuid() else [])]
    todo += [(n, ["out"], nothing, nothing, f) for n, f in OUTS]
    bad = 0
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        cases.write(work / "sound", *sound())
        subprocess.run([o.kvasir, "op", work / "sound", "--out", work / "result"], check=True)
        for number, (name, words, change, damage, spoil) in enumerate(todo):
            case, tensors = sound()
            change(case, tensors)
            cases.write(work / str(number), case, tensors)
            damage(work / str(number))
            for backend in o.backend.split(","):
                out = work / f"{number}.{backend}"
                spoil(out)
                said, wrong = refused(o, backend, work / str(number), out, words)
                bad += bool(wrong)
                if wrong or o.verbose:
                    print(f"{'WRONG ' if wrong else ''}{name}, {backend}: {'; '.join([*wrong, said])}")
    print(f"{len(todo)} broken cases, {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
