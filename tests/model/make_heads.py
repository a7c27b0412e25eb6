#!/usr/bin/env python3
"""Writes tests/model/fixtures/heads.json: what heads that draft (EAGLE-3 folders, a layer of multi-token prediction) make of
small networks' hidden states, in plain torch.

    tests/model/make_heads.py

Uses make_architectures.py's environment and formula of weights; transformers computes the networks and the experts' layer.
Of each head its config.json, its tensors' names and shapes, rows of log-probabilities and a greedy draft are stored.
"""
import json, os, sys, tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir" / "fixtures-venv"

if __name__ == "__main__" and Path(sys.prefix).resolve() != VENV.resolve():
    if not (VENV / "bin" / "python").exists():
        raise SystemExit("run tests/model/make_architectures.py first: it makes the environment")
    os.execv(VENV / "bin" / "python", [str(VENV / "bin" / "python"), *sys.argv])

sys.path.insert(0, str(HERE))
import make_architectures as networks
import torch, transformers
from safetensors.numpy import load_file, save_file

H, FFN, HEADS, KV, DIM, DRAWN = 64, 80, 4, 2, 16, 96
ROWS, AHEAD = [0, 7, 20, 38], 4
PLAIN = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=H, intermediate_size=FFN,
             num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=1, vocab_size=networks.VOCAB,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False)
LAYER = {k: v for k, v in PLAIN.items() if k not in ("architectures", "num_hidden_layers")}
# On by so many that the tokens stay apart and in order.
D2T = [i + i // 2 for i in range(DRAWN)]

# name: (config.json of the head, prefix of its layer's tensors, its embedding, layers whose input it reads, norm before residual)
EAGLE3 = {
    "midlayer": (dict(PLAIN, draft_vocab_size=DRAWN), "midlayer", False, [2, 2, 1], False),
    "layers in eagle_config": (dict(PLAIN, draft_vocab_size=DRAWN, eagle_config=dict(
        eagle_aux_hidden_state_layer_ids=[0, 1, 3], use_aux_hidden_state=True)), "layers.0", False, [1, 2, 4], False),
    "speculators": (dict(architectures=["Eagle3Speculator"], speculators_model_type="eagle3", draft_vocab_size=networks.VOCAB,
                         norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 2, 3],
                         transformer_layer_config=LAYER), "layers.0", True, [1, 2, 3], True),
}


transformers.logging.set_verbosity_error()


def made(shapes):
    return {n: networks.weights(n, s, 1.0) for n, s in shapes.items()}


def rope(x, positions):
    """[tokens, heads, DIM], the halves of each head turned."""
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :DIM // 2], x[..., DIM // 2:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rms(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def attend(q, k, v):
    k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM ** .5
    scores += torch.full(scores.shape[1:], -torch.inf).double().triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(q), -1)


class Eagle3:
    def __init__(self, w, embedding, layer, before):
        w = {n: torch.tensor(t).double() for n, t in w.items()}
        self.w, self.layer, self.before = w, layer, before
        self.embedding = w.get("embed_tokens.weight", embedding)

    def enter(self, states):
        return states @ self.w["fc.weight"].T

    def forward(self, tokens, x):
        """Logits and states of all rows."""
        at = lambda name: self.w[f"{self.layer}.{name}.weight"]
        normed = rms(x, at("hidden_norm"))
        both = torch.cat([rms(self.embedding[tokens], at("input_layernorm")), normed], -1)
        q, k, v = ((both @ at(f"self_attn.{n}_proj").T).view(len(both), -1, DIM) for n in "qkv")
        places = torch.arange(len(both))
        x = (normed if self.before else x) + attend(rope(q, places), rope(k, places), v) @ at("self_attn.o_proj").T
        h = rms(x, at("post_attention_layernorm"))
        x = x + (torch.nn.functional.silu(h @ at("mlp.gate_proj").T) * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
        return rms(x, self.w["norm.weight"]) @ self.w["lm_head.weight"].T, x


class NextLayer:
    """GLM 4's and DeepSeek's: its block is transformers' own."""
    def __init__(self, w, model, number):
        self.w = {n.removeprefix(f"model.layers.{number}."): torch.tensor(t) for n, t in w.items()}
        self.block, self.rotary = model.model.layers[number], model.model.rotary_emb
        self.eps = model.config.rms_norm_eps

    def enter(self, states):
        return states

    def forward(self, tokens, x):
        x, w = x.float(), self.w
        both = torch.cat([rms(w["embed_tokens.weight"][tokens], w["enorm.weight"], self.eps), rms(x, w["hnorm.weight"], self.eps)], -1)
        x = (both @ w["eh_proj.weight"].T)[None]
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min).triu(1)[None, None]
        x = self.block(x, attention_mask=mask, position_ids=places, position_embeddings=self.rotary(x, places))
        x = (x[0] if isinstance(x, tuple) else x)[0]
        return rms(x, w["shared_head.norm.weight"], self.eps) @ w["shared_head.head.weight"].T, x


def said(head, states, of):
    """Rows of log-probabilities, and a draft behind all tokens: each of its tokens goes on with the state of the row before."""
    tokens, x = torch.tensor(networks.TOKENS[1:]), head.enter(states[:-1])
    with torch.no_grad():
        logits, _ = head.forward(tokens, x)
        rows = torch.log_softmax(logits.double(), -1)[ROWS]
        draft = []
        for _ in range(AHEAD):
            logits, out = head.forward(tokens, x)
            draft.append(of[int(logits[-1].argmax())])
            tokens, x = torch.cat([tokens, torch.tensor(draft[-1:])]), torch.cat([x, out[-1:].to(x.dtype)])
    return {"logprobs": [[round(float(v), 5) for v in row] for row in rows], "draft": draft}


def described(config, tensors):
    return {"configs": [config], "norm_base": 1.0, "tensors": [[n, list(t.shape)] for n, t in sorted(tensors.items())]}


def states_of(folder, config):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32,
                                                              attn_implementation="eager").eval()
    with torch.no_grad():
        return model, model(torch.tensor([networks.TOKENS]), output_hidden_states=True).hidden_states


def eagle3_cases():
    with tempfile.TemporaryDirectory() as folder:
        model_type, config, _ = networks.cases()["llama"]
        written, tensors, _, _ = networks.reference("llama", model_type, config, folder)
        model, states = states_of(folder, None)
        embedding = torch.tensor(tensors["model.embed_tokens.weight"]).double()
        for name, (head_config, layer, own, layers, before) in EAGLE3.items():
            drawn = head_config["draft_vocab_size"]
            shapes = {"fc.weight": [H, 3 * H], "norm.weight": [H], "lm_head.weight": [drawn, H]}
            for n, s in dict(hidden_norm=[H], input_layernorm=[H], post_attention_layernorm=[H]).items():
                shapes[f"{layer}.{n}.weight"] = s
            for n, rows in dict(q=HEADS, k=KV, v=KV).items():
                shapes[f"{layer}.self_attn.{n}_proj.weight"] = [rows * DIM, 2 * H]
            shapes[f"{layer}.self_attn.o_proj.weight"] = [H, HEADS * DIM]
            shapes.update({f"{layer}.mlp.gate_proj.weight": [FFN, H], f"{layer}.mlp.up_proj.weight": [FFN, H],
                           f"{layer}.mlp.down_proj.weight": [H, FFN]})
            if own:
                shapes["embed_tokens.weight"] = [networks.VOCAB, H]
            w = made(shapes)
            d2t = D2T if drawn == DRAWN else []
            # transformers' last state is behind the norm; what leaves the last layer is taken before it.
            streams = [states[i][0].double() for i in layers]
            if layers[-1] == len(model.model.layers):
                kept = []
                hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
                with torch.no_grad():
                    model(torch.tensor([networks.TOKENS]))
                hook.remove()
                streams[-1] = kept[0][0].double()
            head = Eagle3(w, embedding, layer, before)
            of = [i + on for i, on in enumerate(d2t)] or list(range(drawn))
            yield dict(name=name, model=described(written, tensors), head=described(head_config, w), d2t=d2t,
                       **said(head, torch.cat(streams, -1), of))


def next_layer_case(name, of):
    model_type, config, _ = networks.cases()[of]
    number = config["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        _, tensors, _, _ = networks.reference(of, model_type, dict(config, num_hidden_layers=number + 1), folder)
        at = f"model.layers.{number}."
        more = made({at + "enorm.weight": [H], at + "hnorm.weight": [H], at + "eh_proj.weight": [H, 2 * H],
                     at + "embed_tokens.weight": [networks.VOCAB, H], at + "shared_head.norm.weight": [H],
                     at + "shared_head.head.weight": [networks.VOCAB, H]})
        whole, _ = states_of(folder, None)
        written = json.loads((Path(folder) / "config.json").read_text())
        written.update(num_hidden_layers=number, num_nextn_predict_layers=1)
        shorter = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=number)
        _, states = states_of(folder, shorter)
        head = NextLayer(more, whole, number)
        return dict(name=name, model=described(written, {**tensors, **more}), d2t=[],
                    **said(head, states[-1][0], list(range(networks.VOCAB))))


def main():
    cases = [*eagle3_cases(), next_layer_case("next layer", "glm4_moe"), next_layer_case("latent next layer", "deepseek_v3")]
    with open(HERE / "fixtures" / "heads.json", "w") as f:
        f.write('{"tokens":%s,"rows":%s,"cases":[\n%s\n]}\n' % (
            json.dumps(networks.TOKENS), json.dumps(ROWS), ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)))


if __name__ == "__main__":
    main()
