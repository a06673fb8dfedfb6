"""Tokens per second of the engine on this GPU: a random model of 4 bits in the shape of Llama-3-8B, nothing downloaded.

``python end_to_end.py OUT.json [--tiny]``. So many requests begin together and write so many tokens; the first run
compiles and captures, the median of the others counts. Steps run one after another, and so that they overlap, and that
in the invariant mode, too.
``--tiny`` goes through Triton's interpreter on the CPU and proves that the program runs, nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams
from tests.kernels.triton.random_model import PRECISIONS, RandomModel, forget, shape_of
from tests.tiny_model import save_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ServedModel(RandomModel):  # type: ignore[misc]
    """What an engine asks of a model besides; its tokenizer knows the first tokens only."""

    format = card = part_of = calibration = None

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        super().__init__(shape, PRECISIONS["w4a16"][0], DEVICE)
        self.path = folder

    def names(self) -> list[str]:
        layers = range(self.config["num_hidden_layers"])
        norms = [f"model.layers.{i}.{name}_layernorm.weight" for i in layers for name in ("input", "post_attention")]
        return ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", *norms]

    def shape(self, name: str) -> tuple[int, ...]:
        if "norm" in name:
            return (self.config["hidden_size"],)
        parts = name.removesuffix(".weight").split(".")
        found: tuple[int, ...] = self._shapes.get(".".join(parts[-2:])) or self._rest[parts[-1]]
        return found

    def nbytes(self, name: str) -> int:
        return prod(self.shape(name)) * 2

    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.path)


def batch(engine: Engine, count: int, prompt: int, output: int) -> float:
    """Tokens per second of ``count`` requests, from the first step to the last."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    prompts: list[str | list[int]] = [[(i * 7 + j) % 90 + 1 for j in range(prompt)] for i in range(count)]
    begin = time.perf_counter()
    tokens = sum(len(each.token_ids) for each in engine.generate(prompts, [params] * count))
    assert tokens == count * output
    return tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    model = "tiny" if asked.tiny else "llama-3-8b"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton's interpreter"
    counts, prompt, output, repeats = ((1, 2), 6, 3, 1) if asked.tiny else ((1, 32, 256), 64, 128, 2)
    results: list[dict[str, Any]] = []
    found = {"device": device, "torch": torch.__version__, "model": model, "precision": "w4a16", "results": results}
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder))
        for weights in Path(folder).glob("*.safetensors"):
            weights.unlink()
        for kernels in ("triton", "triton-invariant"):
            config = EngineConfig(
                kernels=kernels, max_model_len=prompt + output, max_num_seqs=max(counts), enable_prefix_caching=False
            )
            engine = Engine(ServedModel(shape_of(model), Path(folder)), config)  # type: ignore[arg-type]
            forget()
            ways = (False, True) if engine.overlaps else (False,)
            for count, overlaps in product(counts, ways if kernels == "triton" else ways[-1:]):
                engine.overlaps = overlaps
                rates = [batch(engine, count, prompt, output) for _ in range(1 + repeats)][1:]
                results.append({"kernels": kernels, "requests": count, "prompt": prompt, "output": output,
                                "overlaps": overlaps, "tokens_per_second": statistics.median(rates)})  # fmt: skip
                print(f"{kernels}, {count:3} requests, {'steps overlap' if overlaps else 'one step after another'}: "
                      f"{statistics.median(rates):.1f} tok/s", flush=True)  # fmt: skip
                asked.out.write_text(json.dumps(found, indent=1))
            del engine  # its memory is what the next one has
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
