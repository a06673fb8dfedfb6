"""``docs/models.md``: how each causal language model of transformers is served, tried with a small random one of each.

``python -m tests.model_table > docs/models.md`` renews it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.families import native_families
from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import registry
from qserve.kernels.executor import Step
from qserve.kernels.ops import BLOCK_SIZE
from qserve.runtime.fallback.model import TransformersModel
from qserve.runtime.fallback.outline import Outline
from qserve.runtime.fallback.skeleton import configuration
from qserve.runtime.fallback.unsupported import Unsupported
from qserve.runtime.models.decoder import DecoderLimits
from tests.small_models import save_small, small

TOKENS = 37
KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@dataclass(frozen=True)
class Trial:
    """``difference``: the largest between logits and those of plain transformers, where these are about 1 to 5.
    ``same_tokens``: the largest logit is that of the same token at every position. ``same_bits``: token by token the
    logits are those of the whole prompt. ``others``: products that torch computes."""

    difference: float
    same_tokens: bool
    same_bits: bool
    others: frozenset[str] = frozenset()


def trial(kind: str, path: Path) -> Trial:
    """A small model of ``kind``, made in ``path``. Raises ``Unsupported`` where it is not served."""
    plain = save_small(small(kind), path)
    source = HFDirectory(path)
    outline = Outline(configuration(source.config, kind))
    outline.context()
    blocks = -(-TOKENS // BLOCK_SIZE) * len(outline.layout.groups)
    limits = DecoderLimits(TOKENS, TOKENS, TOKENS, blocks)
    model = TransformersModel(source, outline, registry.make(threads=1), limits, kv_dtype=torch.float32)
    ids = torch.randint(3, outline.found.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = plain(input_ids=ids[None], use_cache=False).logits[0]
    found, single = run_chunks(model, ids, 20), run_chunks(model, ids, 1)
    return Trial(
        float((found - wanted).abs().max()),
        torch.equal(found.argmax(-1), wanted.argmax(-1)),
        torch.equal(found, single),
        frozenset(outline.found.others),
    )


def run_chunks(model: TransformersModel, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence, ``chunk`` tokens at a time."""
    rows, done, groups = [], 0, len(model.layout.groups)
    tables = torch.randperm(groups * -(-len(ids) // BLOCK_SIZE)).int().view(groups, 1, -1)
    for part in ids.split(chunk):
        positions = torch.arange(done, done + len(part), dtype=torch.int32)
        blocks, offsets = positions.long() // BLOCK_SIZE, positions % BLOCK_SIZE
        start, wanted = torch.tensor([0, len(part)], dtype=torch.int32), torch.arange(len(part), dtype=torch.int32)
        model.run(*[
            Step(part.int(), positions, table[0, blocks] * BLOCK_SIZE + offsets, start, table, wanted)
            for table in tables
        ])  # fmt: skip
        rows.append(model.logits[: len(part)].clone())
        done += len(part)
    return torch.cat(rows)


def verdict(kind: str) -> tuple[str, str]:
    """(native, fallback or refused; a remark)."""
    if kind in native_families():
        return "native", ""
    try:
        with tempfile.TemporaryDirectory() as path:
            save_small(small(kind), Path(path))
            if (held := HFDirectory(path).config["model_type"]) in native_families():
                return "native", f"as `{held}`"
            found = trial(kind, Path(path))
    except Unsupported as error:
        return "refused", error.reason
    except CheckpointError as error:
        return "refused", str(error).splitlines()[0][-150:]
    except Exception as error:  # of transformers itself, which cannot build, save or run what it made
        return "refused", f"{type(error).__name__} in transformers: {(str(error).splitlines() or [''])[0][:100]}"
    if found.difference > 1e-3 or not found.same_tokens:
        return "refused", f"its logits differ from those of plain transformers ({found.difference:.1g})"
    # What torch computes has other bits in another batch on some processors and not on others.
    return "fallback", f"last bits may vary with the batch: {', '.join(sorted(found.others))}" if found.others else ""


def table(kinds: Sequence[str] = KINDS) -> str:
    found = {kind: verdict(kind) for kind in kinds}
    counts = Counter(how for how, _ in found.values())
    lines = [
        "# Models",
        "",
        "Written by `python -m tests.model_table > docs/models.md`.",
        "",
        f"transformers {transformers.__version__} has {len(KINDS)} types of causal language models (`model_type` in",
        f"`config.json`). The native decoder serves {counts['native']} of them. Another {counts['fallback']} by",
        "transformers' own modules, on our products, paged attention, sampler and scheduler: slower, and on the CPU",
        "alone. For each of these a small random model has the logits of plain transformers within 0.001 in float32,",
        "and the same greedy tokens. When a model is loaded, the logits of a prompt are compared again.",
        "",
        "Of a model that also takes images (Gemma 3, Mistral 3, Qwen-VL and others), the text part is served and",
        "quantized as a model of its own, where its type is native.",
        "Kimi K2 (`kimi_k2`) is `deepseek_v3` by another name, without the code beside its weights; its tokenizer, and",
        "Moonlight's, is rebuilt from `tiktoken.model`.",
        "",
        "| type | served | remark |",
        "| --- | --- | --- |",
        *(f"| `{kind}` | {how} | {remark.replace('|', '/')} |" for kind, (how, remark) in sorted(found.items())),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    sys.stdout.write(table())
