"""Answers that repeat their prompts, each engine with its own prompt lookup: ``python tests/peers/lookup.py
ENVIRONMENTS MODELS CHECKPOINT``, with what ``contest.py`` takes.

The prompts are the datasets that ``qserve bench`` has, in the model's chat template, one request at a time, greedily.
An answer ends where the model ends it, and models that were quantized in different ways give different ones: so output
tokens per second are compared, prompts included. Every peer runs without drafts and with those numbers of tokens that
its documents recommend; its best counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from contest import HERE, REST, THREADS, Contestant
from transformers import AutoTokenizer

from qserve.evals.bench.workload import DATASETS, dataset_path

LLAMA_DRAFTS = (0, 2, 10)  # what its documents recommend for a CPU and for a GPU
OPENVINO_DRAFTS = (0, 5)


@dataclass
class Answering(Contestant):
    """``rates``: output tokens per second of each dataset, by round."""

    rates: dict[str, list[float]] = field(default_factory=dict)

    def answer(self, prompts: list[list[int]], most: int) -> float:
        assert self.process.stdin is not None
        time.sleep(REST)
        print(json.dumps([prompts, most]), file=self.process.stdin, flush=True)
        answer = self._answer()
        return answer["tokens"] / answer["seconds"]


def contestants(environments: Path, models: Path, checkpoint: str) -> list[Answering]:
    """Ours first, with drafts and then without."""

    def entry(name: str, python: str, script: str, *arguments: str) -> Answering:
        return Answering(name, [python, str(HERE / script), *arguments], {})

    openvino, llama = (str(environments / name / "bin" / "python") for name in ("openvino", "llama-cpp"))
    gguf = str(models / "Q4_0.gguf")
    return [
        *(entry(f"qserve, {method}", sys.executable, "qserve_lookup.py", checkpoint, THREADS, method)
          for method in ("ngram", "none")),
        *(entry(f"OpenVINO {bits}, {draft}", openvino, "openvino_lookup.py", str(models / f"openvino-{bits}"), THREADS,
                str(draft)) for bits in ("int4", "int8") for draft in OPENVINO_DRAFTS),
        *(entry(f"llama.cpp Q4_0, {draft}", llama, "llama_cpp_lookup.py", gguf, THREADS, str(draft))
          for draft in LLAMA_DRAFTS),
    ]  # fmt: skip


def questions(checkpoint: str, dataset: str) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = dataset_path(dataset).read_text(encoding="utf-8").splitlines()
    messages = ([{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines)
    texts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in messages]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def table(field_: list[Answering]) -> str:
    """Markdown: medians, ours over our own without drafts, and over the best of the others."""
    lines = ["| tokens/s | " + " | ".join(c.name for c in field_) + " | over our own without | over the best peer |"]
    lines.append("|---" * (len(field_) + 3) + "|")
    for dataset in DATASETS:
        rates = [statistics.median(each.rates[dataset]) for each in field_]
        shown = " | ".join(f"{rate:.0f}" for rate in rates)
        lines.append(f"| {dataset} | {shown} | {rates[0] / rates[1]:.2f}x | {rates[0] / max(rates[2:]):.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=192, help="tokens of an answer")
    options = parser.parse_args()
    asked = {dataset: questions(options.checkpoint, dataset) for dataset in DATASETS}
    running = contestants(options.environments, options.models, options.checkpoint)
    try:
        for contestant in running:
            contestant.start()
            contestant.answer([ids[-64:] for ids in asked[DATASETS[0]][:1]], 16)
        for turn in range(options.rounds):
            first = turn % len(running)
            for dataset, prompts in asked.items():
                for contestant in running[first:] + running[:first]:
                    rate = contestant.answer(prompts, options.most)
                    contestant.rates.setdefault(dataset, []).append(rate)
                    print(f"{turn + 1}: {dataset}: {contestant.name}: {rate:.0f}", file=sys.stderr, flush=True)
    finally:
        for contestant in running:
            contestant.stop()
    print(table(running))


if __name__ == "__main__":
    main()
