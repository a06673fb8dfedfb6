"""GGUF files beside llama.cpp's own: ``python tests/peers/gguf_files.py ENVIRONMENTS MODEL TEXT TEST DIR``.

MODEL is quantized by llama.cpp with an importance matrix of TEXT and without one, and by qserve to files of the same
size: in 4 bits beside Q4_0, in 5 bits beside Q4_K_M, and to the types of Q4_K_M. Divergence from MODEL is measured on
TEST, and every file of qserve's is also judged by llama.cpp: its perplexity on the first windows, and its greedy
tokens. With ``--rescale`` the channels of MODEL, a Llama, are first multiplied by random factors that leave its
function as it was: numbers that were dequantized from blocks then lie on no grid that blocks can express. ENVIRONMENTS
come from ``python tests/environments.py peers DIR llama-cpp``. What is in DIR already is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from torch import Tensor

from qserve import LLM, SamplingParams
from qserve.calibration.text import load_text
from qserve.checkpoint.source import open_model
from qserve.cli import app

HERE = Path(__file__).absolute().parent / "contestants"
PROMPT, ANSWER, WINDOW = 48, 32, 512
BITS = {"Q4_0": 4, "Q4_K_M": 5}
"""Of qserve's weights beside each type of llama.cpp's."""
RECIPES = ("Q4_K_M",)
"""What both quantize to."""
FACTORS = (0.8, 1.25)
FOLDS = {
    "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.v_proj": ["self_attn.o_proj"],
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.up_proj": ["mlp.down_proj"],
}
"""What gives channels, and what reads them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("test")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--options", default="--group-size 32 --embeddings 8", help="of qserve quantize")
    parser.add_argument("--types", nargs="+", default=list(BITS), choices=list(BITS), help="of llama.cpp's")
    parser.add_argument("--samples", type=int, default=128, help="of calibration, 512 tokens each")
    parser.add_argument("--tokens", default="16384")
    parser.add_argument("--window", default="1024")
    parser.add_argument("--rescale", type=int, metavar="SEED", help="of the factors")
    parser.add_argument("--judged", type=int, default=8, help="windows of 512 tokens that llama.cpp judges")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    python = given.environments.absolute() / "llama-cpp" / "bin" / "python"
    if given.rescale is not None:
        dense = given.directory / "base"
        if not dense.exists():
            run("convert", given.model, dense, "--format", "hf")
            rescale(dense, given.rescale)
        given.model = str(dense)
    source = open_model(given.model)
    base = given.directory / "base.gguf"
    if not base.exists():
        run("convert", given.model, base, "--format", "gguf")
    matrix = given.directory / "imatrix.npz"
    if not matrix.exists():
        file = matrix.with_suffix(".gguf")
        run("imatrix", given.model, file, "--calibration", given.text, "--samples", given.samples, "--overwrite")
        np.savez(matrix, **importance(file))
    rows: dict[str, Path] = {}
    for kind in given.types:
        for name, more in (("", []), (", importance matrix", [str(matrix)])):
            file = given.directory / f"llama-{kind}{'-matrix' if more else ''}.gguf"
            if not file.exists():
                command = [python, HERE / "llama_cpp_quantize.py", base, kind, file, *more]
                subprocess.run([str(each) for each in command], check=True, capture_output=True)
            rows[f"llama.cpp {kind}{name}"] = file
    ours = {f"qserve, the size of {kind}": ("--format", "compressed-tensors", "--bits", BITS[kind],
                                            *given.options.split()) for kind in given.types}  # fmt: skip
    ours |= {f"qserve {name}": ("--scheme", name) for name in RECIPES}
    for name, options in ours.items():
        file = given.directory / f"{name.replace(', the size of ', '-').replace(' ', '-type-')}.gguf"
        rows[name] = file
        if not file.exists():
            run("quantize", given.model, file.with_suffix(""), "--calibration", given.text, "--samples", given.samples,
                *options)  # fmt: skip
            run("convert", file.with_suffix(""), file, "--format", "gguf")
    print(f"{'file':40} {'MB':>7} {'KL':>7}  95 %              perplexity")
    for name, file in rows.items():
        report = file.with_suffix(".json")
        if not report.exists():
            run("eval", file, "--against", given.model, "--data", given.test, "--tokens", given.tokens,
                "--window", given.window, "--no-card", "--json", report)  # fmt: skip
        metrics = {each["name"]: each for each in json.loads(report.read_text())["metrics"]}
        kl, perplexity = metrics["kl_mean"], metrics["perplexity"]
        print(f"{name:40} {file.stat().st_size / 1e6:7.1f} {kl['value']:7.4f}  [{kl['low']:.4f}, {kl['high']:.4f}] "
              f" {perplexity['value']:.2f}")  # fmt: skip
    test = torch.tensor(load_text(given.test, "evaluate").tokens(source.tokenizer()))
    for name in (name for name in rows if name.startswith("qserve")):
        print(f"{name}: {judged(python, rows[name], test, given.judged, given.directory)}")


def rescale(directory: Path, seed: int) -> None:
    """Multiply what norms, v and up give by a random factor for each channel, and divide the columns that read it."""
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    config = json.loads((directory / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    for layer, (producer, readers) in product(range(config["num_hidden_layers"]), FOLDS.items()):
        name = f"model.layers.{layer}.{producer}.weight"
        weight = tensors[name]
        factors = torch.empty(len(weight)).uniform_(*FACTORS, generator=generator)
        rows = factors.view(-1, *(1,) * (weight.dim() - 1))
        tensors[name] = (weight.float() * rows).to(weight.dtype)
        for reader in readers:
            name = f"model.layers.{layer}.{reader}.weight"
            weight = tensors[name].float()
            copies = weight.shape[1] // len(factors)  # query heads read the same value head
            read = factors.view(config["num_key_value_heads"], -1).repeat_interleave(copies, 0).flatten()
            tensors[name] = (weight / read).to(tensors[name].dtype)
    save_file(tensors, file, {"format": "pt"})
    (directory / "manifest.json").unlink()  # it has the hash of the file as it was


def importance(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The mean square of each input by the tensors' names, float32 [in], of a matrix as llama.cpp stores it."""
    tensors = {each.name: each.data for each in GGUFReader(file).tensors}
    names = [name.removesuffix(".counts") for name in tensors if name.endswith(".counts")]
    return {name: (tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"])[0] for name in names}


def judged(python: Path, file: Path, test: Tensor, count: int, work: Path) -> str:
    """llama.cpp's perplexity of ``file`` on ``count`` windows beside ours, and how many greedy tokens are the same."""
    windows = test[: count * WINDOW].view(count, WINDOW)
    np.save(work / "windows.npy", windows.numpy())
    np.save(work / "prompt.npy", test[:PROMPT].numpy())
    command = [python, HERE / "llama_cpp_perplexity.py", file, work / "windows.npy", work / "prompt.npy", ANSWER]
    found = json.loads(subprocess.run([str(each) for each in command], check=True, capture_output=True).stdout)
    model = LLM(str(file.with_suffix("")))
    losses = []
    for window in windows.tolist():
        output = model.generate(window, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))[0]
        scores = output.prompt_logprobs
        losses += [-scores[i][window[i]].logprob for i in range(1, WINDOW)]
    ours = float(np.mean(losses))
    answer = model.generate(test[:PROMPT].tolist(), SamplingParams(max_tokens=ANSWER, temperature=0))[0]
    same = sum(a == b for a, b in zip(found["answer"], answer.outputs[0].token_ids))
    return (f"llama.cpp's perplexity {math.exp(found['loss']):.3f}, ours {math.exp(ours):.3f}, "
            f"{same} of {ANSWER} greedy tokens alike")  # fmt: skip


def run(*command: object) -> None:
    app([str(each) for each in command], standalone_mode=False)


if __name__ == "__main__":
    main()
