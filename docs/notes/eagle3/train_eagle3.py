"""Train an EAGLE-3 head (arXiv 2503.01840) for a model on a text, on the CPU, and say how often it guesses right:

    python docs/notes/eagle3/train_eagle3.py MODEL TEXT DIR --seconds 240

Each call goes on where the last one stopped: it computes the model's hidden states once, then trains for ``--seconds``,
and writes ``DIR/head`` in the format of vLLM's speculators. The last tenth of the text is held out. For

    qserve run MODEL --speculative-config '{"method": "eagle3", "model": "DIR/head"}'

The head has one layer, which begins as the model's last one, and drafts the tokens that are most frequent in the text.
In training it sees its own outputs in the place of the model's states, as it does when it drafts (training-time test).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from qserve.checkpoint.source import ModelSource, open_model
from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.config import EngineConfig
from qserve.runtime.models.config import DecoderConfig, decoder_config
from qserve.runtime.models.rope import rope_tables
from qserve.runtime.native_backend import NativeBackend
from qserve.runtime.runner import DecoderRunner

WINDOW = 256
HELD_OUT = 0.1
Table = dict[str, Tensor]


def collect(source: ModelSource, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """float16 [windows, WINDOW, layers, width]: the hidden states of each window of the text by itself."""
    config = EngineConfig(max_model_len=WINDOW, max_num_seqs=1, max_num_batched_tokens=WINDOW)
    loaded = NativeBackend().load(source, config, hidden_layers=layers)
    assert isinstance(loaded.runner, DecoderRunner)
    decoder, positions = loaded.runner.decoder, torch.arange(WINDOW, dtype=torch.int32)
    table = torch.arange(WINDOW // BLOCK_SIZE, dtype=torch.int32)[None]
    count = len(tokens) // WINDOW
    found = torch.empty(count, WINDOW, len(layers), decoder.hidden[0].shape[1], dtype=torch.float16)
    for i, window in enumerate(torch.tensor(tokens[: count * WINDOW], dtype=torch.int32).split(WINDOW)):
        start = torch.tensor([0, WINDOW], dtype=torch.int32)
        decoder.run(Step(window, positions, positions, start, table, positions[:0]))
        found[i] = torch.stack([each[:WINDOW] for each in decoder.hidden], 1)
    return found


class Head(nn.Module):
    """``forward`` takes the states [b, t, read * width] of the first t of tokens [b, t + 1], and returns the logits of
    ``depth`` guesses, [b, t - d, drafts] for guess d (from 0 on): row r is of the token at r + d + 2."""

    def __init__(self, config: DecoderConfig, weights: Table, table: Tensor, drafts: Tensor) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.weights = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(w) for name, w in weights.items()})
        self.register_buffer("table", table, persistent=False)
        self.cosine, self.sine = rope_tables(config, None, WINDOW)
        assert len(self["lm_head.weight"]) == len(drafts) and len(self["fc.weight"]) == width

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def forward(self, states: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
        features, logits = states @ self["fc.weight"].T, []
        embedded = F.embedding(tokens, self.table)
        kept: list[tuple[Tensor, Tensor]] = []
        for made in range(depth):  # row r holds the token at r + 1 + made
            rows = features.shape[1] - (made > 0)
            features = features[:, :rows]
            x = self._layer(features, embedded[:, 1 + made : 1 + made + rows], kept, made)
            logits.append(self._norm(x, "norm") @ self["lm_head.weight"].T)
            features = x
        return logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self[f"{name}.weight"], self.config.rms_norm_eps)

    def _layer(self, features: Tensor, embedded: Tensor, kept: list[tuple[Tensor, Tensor]], made: int) -> Tensor:
        """Row r of guess ``made`` sees rows 0 .. r of the first pass, and row r of each later one."""
        config, rows = self.config, features.shape[1]
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        joined = torch.cat([self._norm(embedded, "layers.0.input_layernorm"),
                            self._norm(features, "layers.0.hidden_norm")], -1)  # fmt: skip
        q, k, v = (
            (joined @ self[f"layers.0.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(1, 2)
            for name in "qkv"
        )
        cosine, sine = self.cosine[made : made + rows], self.sine[made : made + rows]
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        kept.append((k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)))
        first, values = (each[:, :, :rows] for each in kept[0])
        scores = (q @ first.transpose(2, 3)) * dim**-0.5
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -math.inf)
        own = [(q * keys[:, :, :rows]).sum(-1, keepdim=True) * dim**-0.5 for keys, _ in kept[1:]]
        shares = torch.cat([scores, *own], -1).softmax(-1)
        mixed = shares[..., :rows] @ values
        for i, (_, others) in enumerate(kept[1:]):
            mixed = mixed + shares[..., rows + i : rows + i + 1] * others[:, :, :rows]
        x = features + mixed.transpose(1, 2).flatten(2) @ self["layers.0.self_attn.o_proj.weight"].T
        y = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (y @ self[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self["layers.0.mlp.down_proj.weight"].T


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


def first_weights(source: ModelSource, config: DecoderConfig, drafts: Tensor, read: int) -> Table:
    """Weights of a head that begins as the model's last layer, on the highest of the states that it reads."""
    modules, width = config.modules, config.hidden_size
    last = f"{modules.layers}.{config.num_hidden_layers - 1}"

    def taken(name: str) -> Tensor:
        return source.tensor(f"{name}.weight").float()

    head = modules.head if source.has(f"{modules.head}.weight") else modules.embedding
    weights = {
        "fc.weight": torch.cat([*[torch.zeros(width, width)] * (read - 1), torch.eye(width)], 1),
        "norm.weight": taken(modules.norm),
        "lm_head.weight": taken(head)[drafts],
        "layers.0.hidden_norm.weight": taken(f"{last}.{modules.attention_norm}"),
        "layers.0.input_layernorm.weight": torch.ones(width),
        "layers.0.post_attention_layernorm.weight": taken(f"{last}.{modules.mlp_norm}"),
    }
    for name in modules.qkv:
        weight = taken(f"{last}.{name}")
        weights[f"layers.0.{name}.weight"] = torch.cat([0.02 * torch.randn(len(weight), width), weight], 1)
    for name in (modules.out, *modules.up, modules.down):
        weights[f"layers.0.{name}.weight"] = taken(f"{last}.{name}")
    return weights


def save(path: Path, head: Head, config: DecoderConfig, drafts: Tensor, layers: tuple[int, ...], name: str) -> None:
    """The head in the speculators format."""
    path.mkdir(parents=True, exist_ok=True)
    layer = {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 1, "head_dim": config.head_dim,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu", "rope_parameters": config.hf.rope_parameters, "tie_word_embeddings": False,
    }  # fmt: skip
    content = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.4.0",
        "draft_vocab_size": len(drafts), "norm_before_residual": False, "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": list(layers), "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": name, "architectures": []},
        },
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(content, indent=2))
    tensors = {key.replace("/", "."): value.detach().bfloat16() for key, value in head.weights.items()}
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[drafts] = True
    tensors |= {"d2t": drafts - torch.arange(len(drafts)), "t2d": known}
    save_file(tensors, path / "model.safetensors")


def main(arguments: list[str] | None = None) -> list[float]:
    """Returns for each guess how often it is right on the text held out, if those before it are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--drafts", type=int, default=8192, help="tokens that the head can guess")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--steps", type=int, default=600, help="of four windows each, in all calls together")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--depth", type=int, default=3)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    source = open_model(given.model)
    config = decoder_config(source.config, source.name)
    count = config.num_hidden_layers
    layers = tuple(sorted({min(2, count - 1), count // 2, max(count - 3, 0)}))
    given.out.mkdir(parents=True, exist_ok=True)
    states_file, training = given.out / "states.pt", given.out / "training.pt"
    tokens = source.tokenizer()(given.text.read_text(encoding="utf-8"))["input_ids"][: given.tokens]
    if not states_file.exists():
        began = time.perf_counter()
        torch.save(collect(source, tokens, (*layers, count)), states_file)
        print(f"states of {len(tokens)} tokens: {time.perf_counter() - began:.0f} s", flush=True)
    states = torch.load(states_file, mmap=True)
    windows = torch.tensor(tokens[: len(states) * WINDOW]).view(-1, WINDOW)
    held = max(1, int(len(windows) * HELD_OUT))
    often = Counter(windows[:-held].flatten().tolist()).most_common(given.drafts)
    often += [(token, 0) for token in set(range(config.vocab_size)) - {token for token, _ in often}]
    drafts = torch.tensor(sorted(token for token, _ in often[: given.drafts]))
    norm = source.tensor(f"{config.modules.norm}.weight").float()
    table = source.tensor(f"{config.modules.embedding}.weight").float()
    output = f"{config.modules.head}.weight"
    wanted = source.tensor(output).float() if source.has(output) else table
    head = Head(config, first_weights(source, config, drafts, len(layers)), table, drafts)
    state: dict[str, Any] = {"step": 0}
    optimizer = torch.optim.AdamW(head.parameters(), lr=given.rate, weight_decay=0.0, betas=(0.9, 0.95))
    if training.exists():
        state = torch.load(training)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])

    def batch(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states that the head reads, the tokens, and the model's last states behind their norm."""
        taken = states[index].float()
        last = F.rms_norm(taken[:, :, -1], taken.shape[-1:], norm, config.rms_norm_eps)
        return taken[:, :-1, :-1].flatten(2), windows[index], last

    def loss_of(index: Tensor) -> Tensor:
        read, ids, last = batch(index)
        with torch.no_grad():
            target = (last @ wanted[drafts].T).softmax(-1)
        found, weight, total = head(read, ids, given.depth), 1.0, torch.zeros(())
        for made, logits in enumerate(found):  # at row r the token at r + 1 + made is known
            aim = target[:, 1 + made : 1 + made + logits.shape[1]]
            total = total - weight * (aim * logits.log_softmax(-1)).sum(-1).mean()
            weight *= 0.8
        return total

    def right() -> list[float]:
        """Of the held-out windows; the model's choice is its likeliest token."""
        tried, hit = torch.zeros(given.depth), torch.zeros(given.depth)
        with torch.no_grad():
            for index in torch.arange(len(windows) - held, len(windows)).split(4):
                read, ids, last = batch(index)
                chosen = (last @ wanted.T).argmax(-1)
                alive, guess = torch.ones_like(ids[:, 1:], dtype=torch.bool), ids[:, 1:]
                for made, logits in enumerate(head(read, ids, given.depth)):
                    rows = logits.shape[1]
                    # A further guess counts where the text is what was guessed, and what the model chose.
                    alive = alive[:, :rows] & (guess[:, :rows] == ids[:, 1 + made : 1 + made + rows])
                    guess = drafts[logits.argmax(-1)]
                    tried[made] += alive.sum()
                    alive = alive & (guess == chosen[:, 1 + made : 1 + made + rows])
                    hit[made] += alive.sum()
        return (hit / tried.clamp_min(1)).tolist()

    began, chance = time.perf_counter(), torch.Generator()
    while state["step"] < given.steps and time.perf_counter() - began < given.seconds:
        step = state["step"]
        for group in optimizer.param_groups:
            group["lr"] = given.rate * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 - step / given.steps))
        index = torch.randint(len(windows) - held, (4,), generator=chance.manual_seed(step))
        loss = loss_of(index)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        state["step"] = step + 1
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": state["step"]}, training)
    save(given.out / "head", head, config, drafts, layers, source.name)
    rates = right()
    shown = ", ".join(f"{rate:.1%}" for rate in rates)
    print(f"after {state['step']} steps, right on held-out text: {shown}", flush=True)
    return rates


if __name__ == "__main__":
    main()
