"""transformers with static batches, beside our engine: the same shape with random weights in bf16, on the same device.

Plain ``generate``: the prompts of a batch are equally long, begin together and end together. Every token is stamped
when it is chosen, so that one run gives the time of the prompt and of a step.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from qserve.evals.bench.roofline import Roof
from qserve.runtime.models.config import decoder_config
from tests.kernels.triton.bounds import floor, lacking, weight_bytes

NAME = "transformers bf16"


@dataclass
class _Stamps(LogitsProcessor):  # type: ignore[misc]
    """When the scores of each token were there."""

    device: torch.device
    times: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())
        return scores


def _generate(model: Any, batch: int, prompt: int, output: int) -> list[float]:
    """Seconds until each token."""
    device = next(model.parameters()).device
    ids = torch.randint(1, model.config.vocab_size, (batch, prompt), device=device)
    stamps = _Stamps(device)
    begin = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=output, max_new_tokens=output,
            pad_token_id=0, logits_processor=LogitsProcessorList([stamps]),
        )  # fmt: skip
    assert made.shape == (batch, prompt + output)
    return [at - begin for at in stamps.times]


def measure(
    name: str, shape: dict[str, Any], device: torch.device, roof: Roof, context: int,
    prompts: Sequence[tuple[int, int]], batches: Sequence[int], output: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One line after another: a prefill of each of ``prompts`` (how many, tokens of each), and for each batch a step
    of decode at ``context`` tokens, the middle of ``output``. What does not fit the memory says so."""
    ours = decoder_config(shape, name)
    about = {"model": name, "precision": NAME}
    needed = weight_bytes(ours, None)
    if (reason := lacking(device, needed)) is not None:
        yield {**about, "skipped": f"the weights do not fit: {reason}"}
        return
    plain = {key: value for key, value in shape.items() if key != "model_type"}
    with device:
        config = AutoConfig.for_model(shape["model_type"], **plain)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None

    def line(kind: str, batch: int, tokens: int, seen: int, seconds: float) -> dict[str, Any]:
        bound = floor(ours, None, 2, batch, tokens, seen, roof)
        return {**about, "kind": kind, "batch": batch, "context": seen, "seconds": seconds,
                "tokens_per_second": tokens / seconds, "share_of_roofline": bound / seconds}  # fmt: skip

    for count, prompt in prompts:
        try:
            _generate(model, count, prompt, 1)  # and all that the first run takes longer for
            seconds = statistics.median(_generate(model, count, prompt, 1)[0] for _ in range(3))
        except torch.OutOfMemoryError:
            yield {**about, "skipped": f"{count} prompts of {prompt} do not fit: out of memory"}
            continue
        yield line("prefill", count, count * prompt, prompt, seconds)
    for batch in batches:
        cache = batch * (context + output) * ours.kv_bytes_per_token(2)
        if (reason := lacking(device, cache)) is not None:
            yield {**about, "skipped": f"{batch} requests do not fit: {reason}"}
            continue
        try:
            times = _generate(model, batch, context - output // 2, output)
        except torch.OutOfMemoryError:
            yield {**about, "skipped": f"{batch} requests do not fit: out of memory beside the cache"}
            continue
        steps = [late - early for early, late in pairwise(times)]
        yield line("decode", batch, batch, context, statistics.median(steps))
    del model
    gc.collect()
