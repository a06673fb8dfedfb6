"""The options that only ``qserve quantize`` has: name, type and help. Defaults are with the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve.commands.options import needs_plots
from qserve.quantize.gguf_recipes import RECIPES
from qserve.quantize.methods import METHODS

Scheme = Annotated[
    str,
    typer.Option(
        help="Which numbers. weights: integers of --bits, inputs stay floats. trellis: codes of 2 to 4 --bits, "
        "chosen together, which qserve alone reads. nvfp4a16: floats of 4 bits, 16 to a scale; nvfp4: inputs likewise, "
        "for Blackwell GPUs; mxfp4a16: 32 to a power of two. w4afp8: integers of 4 bits in groups of 128, fp8 inputs, "
        "for Hopper. w8a8: int8 weights and inputs. fp8: e4m3 per channel and per token; fp8-tensor: one scale each; "
        "fp8-static: the same with calibrated input scales; fp8-block: blocks of 128 x 128; mxfp8: groups of 32. For "
        "llama.cpp, its own types: " + ", ".join(RECIPES) + "."
    ),
]
Bits = Annotated[
    int, typer.Option(help="Bits per weight: 2, 3, 4, 5, 6 or 8. Fewer are smaller and, below 4, clearly worse.")
]
GroupSize = Annotated[
    int,
    typer.Option(
        help="Inputs that share a scale, -1 for all: smaller groups are closer to the model and larger on disk (a "
        "scale takes 16 bits). Of --embeddings and --head at most 64 share one."
    ),
]
Symmetric = Annotated[
    bool,
    typer.Option(
        "--sym/--asym",
        help="Whether zero is always the same code, or each group has a zero point of its own, as AWQ's "
        "kernels expect.",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help="How codes are chosen. "
        + " ".join(f"{method.name}: {method.help}." for method in METHODS.values())
        + " auto: gptq, smoothquant for w8a8, smoothquant+gptq for nvfp4, rtn for fp8."
    ),
]
Effort = Annotated[
    str,
    typer.Option(
        help="How much time gptq may take. fast: each layer keeps its own error small. normal, twice as long: it "
        "also makes up for what earlier layers lost. best, ten times as long: the rounding is then learned "
        "(SignRound) and, where the whole model fits memory, all scales are tuned for its predictions."
    ),
]
Hours = Annotated[
    float | None,
    typer.Option(
        help="Of the whole run, with --effort best: the tuning of all scales goes on in longer and longer rounds, "
        "while there is time for one and text that it does not learn from gains.",
    ),
]
ActOrder = Annotated[
    bool,
    typer.Option(
        "--act-order/--no-act-order",
        help="GPTQ: round the inputs with the largest values first, "
        "when most others are left to make up for the error. Costs nothing when serving.",
    ),
]
HeadBits = Annotated[
    int,
    typer.Option(
        help="Bits of the output head, the largest layer of small models: 8, 6, 5 or 4; 0 keeps it in 16. A head that "
        "is the embedding (tied) becomes a layer of its own."
    ),
]
EmbeddingBits = Annotated[
    int,
    typer.Option(
        help="Bits of the embedding: 8, or 6 or 5 for smaller files (in memory a code takes a byte in all); 0 keeps it "
        "in 16. A head that is the embedding (tied) has them too, unless --head gives it its own."
    ),
]
KeepExperts = Annotated[
    bool,
    typer.Option(
        "--keep-experts",
        help="Leave the experts of a mixture as they are stored: in MXFP4 (GPT-OSS), in fp8 or in 16 bits.",
    ),
]
KvCache = Annotated[
    str,
    typer.Option(
        help="Calibrate for a KV cache in int8, fp8 or int4_per_token_head; none leaves that to the server."
    ),
]
KvScales = Annotated[
    str,
    typer.Option(
        help="Scales of the KV cache: tensor, one for each layer's keys and values, "
        "which most servers read; or head, one for each of their heads, a little closer."
    ),
]
TargetBits = Annotated[
    float | None,
    typer.Option(
        help="Mixed precision: choose each layer's bits, or with fp8 and w8a8 which layers keep 16, so that the "
        "average, scales included, is at most this."
    ),
]
Minimize = Annotated[
    str | None,
    typer.Option(
        help="size: choose each layer's bits so that the checkpoint is the smallest "
        "whose divergence from the model, measured, is within --max-kl.",
        metavar="size",
    ),
]
CheckpointFormat = Annotated[
    str,
    typer.Option(
        help="gptq, gptq_v2, awq, compressed-tensors, fp8 or gguf (llama.cpp's blocks, of which qserve convert makes a "
        "file); auto takes the one most loaders read, and for mixed precision compressed-tensors, which stores no zero "
        "points that are all alike."
    ),
]
Calibration = Annotated[
    str,
    typer.Option(
        help="Calibration text: self (the model writes half of it), builtin, a text or JSONL file (lines with "
        "text or messages), a dataset, or none (rtn).",
        metavar="SOURCE",
    ),
]
Samples = Annotated[int, typer.Option(help="Calibration samples.")]
SequenceLength = Annotated[int, typer.Option(help="Tokens per calibration sample.")]
Seed = Annotated[int, typer.Option(help="Which samples are drawn.")]
Lora = Annotated[
    Path | None,
    typer.Option(help="A LoRA adapter (PEFT's directory) that is merged into MODEL first.", metavar="PATH"),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where to compute: auto takes a GPU where there is one; cpu; cuda, or one of several (cuda:1). Results "
        "agree to rounding."
    ),
]
Offload = Annotated[bool, typer.Option(help="Keep hidden states on disk, few of them in memory.")]
MaxMemory = Annotated[
    str | None, typer.Option(help="Plan with this much memory, as 16GiB. [default: what is free]", metavar="SIZE")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show plan, forecast and size of the output, and stop.")
]
ReportDir = Annotated[
    Path | None,
    typer.Option(
        "--report",
        help="Write quantization.json, .md and .html with plots there. Where they replace those of another job on "
        "the same model and text, its divergence and size are shown beside.",
        metavar="DIR",
        callback=needs_plots,
    ),
]
