"""EAGLE-3 heads made at random, and what they compute row by row, from the equations of arXiv 2503.01840."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def save_head(
    path: Path, *, vocab: int, width: int = 64, target: int = 64, read: tuple[int, ...] = (0, 1, 2), drafts: int = 60,
    layers: int = 1, kind: str = "llama", bias: bool = False, own_table: bool = True, size: float = 0.15, seed: int = 0,
    **config: Any,
) -> Path:  # fmt: skip
    """A head for a model of ``vocab`` tokens and the width ``target``, in the directory ``path``. ``drafts``: tokens
    that it guesses, 0 for all. ``config``: more keys of its config.json."""
    path.mkdir(parents=True)
    drafts = drafts or vocab
    heads, groups, dim, inner = 4, 2, 16, 96
    chance = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return size * torch.randn(*shape, generator=chance)

    tensors = {"fc.weight": random(width, target * len(read)), "lm_head.weight": random(drafts, width)}
    norms = ["norm", "layers.0.hidden_norm", *(["input_norm"] if config.get("norm_before_fc") else [])]
    for i in range(layers):
        name, inp = f"layers.{i}", width if i else 2 * width
        norms += [f"{name}.input_layernorm", f"{name}.post_attention_layernorm"]
        for part, out in (("q", heads), ("k", groups), ("v", groups)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = random(out * dim, inp)
            if bias:
                tensors[f"{name}.self_attn.{part}_proj.bias"] = random(out * dim)
        tensors[f"{name}.self_attn.o_proj.weight"] = random(width, heads * dim)
        if bias:
            tensors[f"{name}.self_attn.o_proj.bias"] = random(width)
        if kind == "qwen3":
            tensors |= {f"{name}.self_attn.{part}_norm.weight": 1 + random(dim) for part in "qk"}
        tensors |= {f"{name}.mlp.{part}_proj.weight": random(inner, width) for part in ("gate", "up")}
        tensors[f"{name}.mlp.down_proj.weight"] = random(width, inner)
    for norm in norms:
        tensors[f"{norm}.weight"] = 1 + random(len(read) * target if norm == "input_norm" else width)
    if own_table:
        tensors["embed_tokens.weight"] = random(vocab, width)
    if drafts != vocab:
        chosen = torch.randperm(vocab, generator=chance)[:drafts].sort().values
        known = torch.zeros(vocab, dtype=torch.bool)
        known[chosen] = True
        tensors |= {"d2t": chosen - torch.arange(drafts), "t2d": known}
    save_file(tensors, path / "model.safetensors")
    layer = {
        "model_type": kind, "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "head_dim": dim,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0, "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": bias,
    }  # fmt: skip
    content = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": drafts,
        "eagle_aux_hidden_state_layer_ids": list(read), "transformer_layer_config": layer, **config,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(content))
    return path


class NaiveHead:
    """The head in ``path``, in float32, without pages, batches or programs. ``table``: the target's embeddings, where
    it has none of its own."""

    def __init__(self, path: Path, table: Tensor | None = None) -> None:
        self.tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
        self.config = json.loads((path / "config.json").read_text())
        self.layer = self.config["transformer_layer_config"]
        self.table = self.tensors.get("embed_tokens.weight", table)
        self.seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layer["num_hidden_layers"])]

    def features(self, states: Tensor) -> Tensor:
        """Of the target's states [layers * width] of one position."""
        if self.config.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        return self.tensors["fc.weight"] @ states

    def row(self, token: int, features: Tensor) -> Tensor:
        """The output of the next row, which sees all rows before it."""
        assert self.table is not None
        x = self._norm(features, "layers.0.hidden_norm") if self.config.get("norm_before_residual") else features
        y = torch.cat([self._norm(self.table[token].float(), "layers.0.input_layernorm"),
                       self._norm(features, "layers.0.hidden_norm")])  # fmt: skip
        for i, seen in enumerate(self.seen):
            if i:
                y = self._norm(x, f"layers.{i}.input_layernorm")
            q, k, v = (self._linear(y, f"layers.{i}.self_attn.{part}_proj").view(-1, 16) for part in "qkv")
            if self.layer["model_type"] == "qwen3":
                q, k = (self._norm(z, f"layers.{i}.self_attn.{part}_norm") for z, part in ((q, "q"), (k, "k")))
            seen.append((self._rotate(k, len(seen)), v))
            q = self._rotate(q, len(seen) - 1)
            mixed = []
            for head in range(4):
                scores = torch.stack([q[head] @ keys[head // 2] for keys, _ in seen]) / 4.0
                mixed.append(scores.softmax(0) @ torch.stack([values[head // 2] for _, values in seen]))
            x = x + self._linear(torch.cat(mixed), f"layers.{i}.self_attn.o_proj")
            y = self._norm(x, f"layers.{i}.post_attention_layernorm")
            gate = self._linear(y, f"layers.{i}.mlp.gate_proj")
            gate = gate * gate.sigmoid() * self._linear(y, f"layers.{i}.mlp.up_proj")
            x = x + self._linear(gate, f"layers.{i}.mlp.down_proj")
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Of the drafts' vocabulary."""
        return self.tensors["lm_head.weight"] @ self._norm(x, "norm")

    def target(self, draft: int) -> int:
        return draft + int(self.tensors["d2t"][draft]) if "d2t" in self.tensors else draft

    def drafts(self, states: Tensor, tokens: list[int], count: int) -> list[int]:
        """``count`` guesses of what follows ``tokens``; states [tokens - 1, …] of the positions before the last."""
        self.seen = [[] for _ in self.seen]
        for token, state in zip(tokens[1:], states, strict=True):
            x = self.row(token, self.features(state))
        found = [self.target(int(self.logits(x).argmax()))]
        while len(found) < count:
            x = self.row(found[-1], x)
            found.append(self.target(int(self.logits(x).argmax())))
        return found

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        y = self.tensors[f"{name}.weight"] @ x
        return y if bias is None else y + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.tensors[f"{name}.weight"]

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        angles = position / 1000.0 ** (torch.arange(8) / 8)
        left, right = x[:, :8], x[:, 8:]
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)
