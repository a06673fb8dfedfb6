"""``QuantizeJob``: what the pipeline is asked to do: the options and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qserve.calibration.text import SELF
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.spec import (
    INT4_KV,
    MICROSCALED,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_INPUTS,
    ActivationScheme,
    KVScheme,
    WeightScheme,
)
from qserve.quantize.gguf_recipes import RECIPES, Recipe
from qserve.quantize.methods import METHODS, Method, usual_method

SCHEMES = (
    "weights", "trellis", "nvfp4", "nvfp4a16", "mxfp4a16", "w4afp8", "w8a8", "fp8", "fp8-tensor", "fp8-static",
    "fp8-block", "mxfp8", *RECIPES,
)  # fmt: skip


@dataclass(frozen=True)
class QuantizeJob:
    """The numbers that a checkpoint holds (the first options), how they are found, and from what data.

    scheme           weights: integers of ``bits`` in groups; trellis: codes of 2 to 4 bits that outputs choose
                     together, which qserve alone reads; nvfp4a16: e2m1 numbers of 4 bits, an e4m3 scale for every 16
                     inputs; nvfp4: the inputs of products likewise; mxfp4a16: a power of two for every 32 inputs;
                     w4afp8: integers of 4 bits in groups of 128, e4m3 inputs per token; w8a8: int8 weights per channel,
                     int8 inputs per token; fp8: e4m3 weights per channel, inputs per token; fp8-tensor: one scale for
                     each, inputs dynamic; fp8-static: the same with calibrated input scales; fp8-block: weights in
                     blocks of 128 x 128, inputs in groups of 128; mxfp8: both in groups of 32; Q4_K_M and the other
                     ``RECIPES``: llama.cpp's types of these names, in the format gguf, which also choose what embedding
                     and head have
    method           a name in ``METHODS``; None takes the one usual for the scheme
    effort           of error compensation: fast rounds each layer for the inputs it gets; normal also follows the
                     float model and makes up for what earlier layers lost; best learns the rounding after that
                     (SignRound, for integers), and in the end the scales of the whole model
    hours            from the start, that the best effort may tune these scales, while a held-out text gains; None does
                     ``distill.STEPS``
    head_bits        of the output head, 0 keeps it; embedding_bits likewise. A tied head has the bits of the embedding;
                     with bits of its own it becomes a layer of its own
    kv_cache         int8 or fp8: calibrated scales for the cache, for each layer or each head, and the mean key; or
                     int4_per_token_head: the mean key alone
    target_bits      mixed precision: stored bits per weight at most, scales included; with w8a8 and fp8 it chooses the
                     linears that are kept in 16-bit floats
    keep_experts     the experts of a mixture stay as they are stored: in MXFP4, in fp8, or in 16-bit floats
    max_kl           mixed precision: the smallest checkpoint within this divergence (nats)
    calibration      a SOURCE of ``load_text``; self: the builtin text and as much that the model writes
                     (``generated_windows``); or None (every input counts the same)
    format           of the checkpoint, or auto
    loaders          must accept the checkpoint, or the job is refused before calibration
    overwrite        replace a checkpoint at OUT
    offload          keep hidden states on disk
    max_memory       bytes this process may use, or None for what is free
    device           of the computations: auto takes a GPU where there is one; cpu; cuda, or one of several (cuda:1)
    Raises ``UsageError`` for values that contradict each other.
    """

    scheme: str = "weights"
    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    head_bits: int = 0
    embedding_bits: int = 0
    kv_cache: Literal["int8", "fp8", "int4_per_token_head"] | None = None
    kv_granularity: Literal["tensor", "head"] = "tensor"
    method: str | None = None
    effort: Literal["fast", "normal", "best"] = "normal"
    hours: float | None = None
    act_order: bool = True
    keep_experts: bool = False
    target_bits: float | None = None
    max_kl: float | None = None
    calibration: str | None = SELF
    samples: int = 128
    sequence_length: int = 512
    seed: int = 0
    format: str = "auto"
    loaders: tuple[str, ...] = ("qserve",)
    overwrite: bool = False
    offload: bool = False
    max_memory: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        self._check_choices()
        if self.recipe is not None:
            self._check_recipe()
        self._check_method()
        if self.mixed and self.scheme not in ("weights", "w8a8", "fp8"):
            raise UsageError("mixed precision is for --scheme weights, or w8a8 and fp8 and which layers keep 16 bits")
        if self.keep_experts and self.mixed:
            raise UsageError("--keep-experts fixes what mixed precision would choose: leave one of them out")
        if self.target_bits is not None and self.max_kl is not None:
            raise UsageError("--target-bits fixes the size, --minimize size asks for the smallest: give one of them")
        if self.target_bits is not None and not 2 <= self.target_bits <= 16:
            raise UsageError(f"--target-bits must be 2 to 16, not {self.target_bits}")
        if self.max_kl is not None and not 0 < self.max_kl < float("inf"):
            raise UsageError(f"--max-kl must be above 0 to minimize size, not {self.max_kl}")
        if self.hours is not None and not 0 < self.hours < 10_000:
            raise UsageError(f"--hours must be above 0 and below 10,000, not {self.hours}")
        if self.hours is not None and self.effort != "best":
            raise UsageError("--hours is for --effort best, which uses them")
        if self.hours is not None and self.max_kl is not None:
            raise UsageError("--minimize size makes several checkpoints: leave out --hours")
        for flag, value in (("--samples", self.samples), ("--sequence-length", self.sequence_length)):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1, not {value}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be 0 to 2**63 - 1, not {self.seed}")
        if self.max_memory is not None and self.max_memory < 1:
            raise UsageError(f"the memory limit must be positive, not {self.max_memory}")
        self.weights  # noqa: B018  (checks bits and group size)

    def _check_choices(self) -> None:
        for flag, value, known in (
            ("--scheme", self.scheme, SCHEMES),
            ("--method", self.method, (None, *METHODS)),
            ("--effort", self.effort, ("fast", "normal", "best")),
            ("--device", "cuda" if self.device.startswith("cuda:") else self.device, ("auto", "cpu", "cuda")),
            ("--kv-cache", self.kv_cache, (None, "int8", "fp8", INT4_KV.dtype)),
            ("--kv-scales", self.kv_granularity, ("tensor", "head")),
            ("--head", self.head_bits, (0, 4, 5, 6, 8)),
            ("--embeddings", self.embedding_bits, (0, 5, 6, 8)),
        ):
            if value not in known:
                raise UsageError(f"{flag} must be one of {', '.join(str(k) for k in known if k)}, not {value!r}")
        if self.kv_cache == INT4_KV.dtype and self.kv_granularity != "tensor":
            raise UsageError(f"--kv-scales is for int8 and fp8: {self.kv_cache} has one for each token and head")

    def _check_method(self) -> None:
        method = self.algorithm
        if self.calibration is None:
            reasons = {
                f"the method {method.name}": method.text == "needed",
                "--effort best": self.effort == "best",
                "--kv-cache": self.kv_cache is not None,
                "mixed precision": self.mixed,
                f"--scheme {self.scheme}": self.activations is not None and not self.activations.dynamic,
            }
            for what, needed in reasons.items():
                if needed:
                    raise UsageError(f"{what} needs calibration text; give --calibration builtin or a file")
        if method.inputs != "any" and method.inputs != ("float" if self.activations is None else "rounded"):
            raise UsageError(method.instead)
        if self.scheme == "trellis" and method.name not in ("gptq", "yaqa", "rtn"):
            raise UsageError(f"--scheme trellis is for --method gptq, yaqa or rtn, not {method.name}")
        if self.weights in MICROSCALED and not method.symmetric:
            raise UsageError(f"{method.name} finds zero points, which --scheme {self.scheme} has none of")
        if self.symmetric and not method.symmetric:
            raise UsageError(f"{method.name} finds zero points: use --asym with it")
        if self.effort == "best" and self.scheme not in ("weights", "trellis"):
            raise UsageError("--effort best is for weights alone: use it with --scheme weights or trellis")
        if self.effort == "best" and not method.compensates:
            compensating = " or ".join(f"--method {each.name}" for each in METHODS.values() if each.compensates)
            raise UsageError(f"--effort best learns the rounding that error compensation began: use {compensating}")


    def _check_recipe(self) -> None:
        if self.algorithm.search_scale is not None or not self.algorithm.symmetric:
            raise UsageError(f"--scheme {self.scheme} is for --method gptq, yaqa or rtn, not {self.algorithm.name}")
        if self.head_bits or self.embedding_bits:
            raise UsageError(f"--scheme {self.scheme} chooses the types of embedding and head: leave out --embeddings "
                             "and --head")  # fmt: skip
        if self.format not in ("auto", "gguf"):
            raise UsageError(f"--scheme {self.scheme} is written in the format gguf, not {self.format}")

    @property
    def recipe(self) -> Recipe | None:
        return RECIPES.get(self.scheme)

    @property
    def algorithm(self) -> Method:
        """The row of ``method``, or of the usual method for the scheme."""
        return usual_method(self.scheme) if self.method is None else METHODS[self.method]

    @property
    def text(self) -> str | None:
        """The calibration text to read, None where no option uses it."""
        used = self.algorithm.text != "unused" or self.kv_cache is not None or self.mixed
        return self.calibration if used else None

    @property
    def mixed(self) -> bool:
        return self.target_bits is not None or self.max_kl is not None

    @property
    def weights(self) -> WeightScheme:
        """The scheme of the linears inside the blocks, unless another is chosen for one."""
        if self.recipe is not None:
            return GGUF_SCHEMES[self.recipe.usual]
        match self.scheme:
            case "weights":
                return WeightScheme(self.bits, self.group_size, self.symmetric)
            case "trellis":
                return WeightScheme(self.bits, self.group_size, self.symmetric, "trellis")
            case "nvfp4" | "nvfp4a16":
                return NVFP4
            case "mxfp4a16":
                return MXFP4
            case "w4afp8":
                return WeightScheme(4, 128)
            case "w8a8":
                return WeightScheme(8, -1)
            case "fp8":
                return WeightScheme(8, -1, dtype="fp8")
            case "fp8-block":
                return WeightScheme(8, 128, dtype="fp8", rows=128)
            case "mxfp8":
                return MXFP8
        return WeightScheme(8, -1, dtype="fp8", rows=-1)

    @property
    def activations(self) -> ActivationScheme | None:
        if self.recipe is not None:
            return None
        match self.scheme:
            case "weights" | "trellis" | "nvfp4a16" | "mxfp4a16":
                return None
            case "nvfp4":
                return NVFP4_INPUTS
            case "w8a8":
                return ActivationScheme("int8")
            case "fp8" | "w4afp8":
                return ActivationScheme("fp8")
            case "fp8-block":
                return ActivationScheme("fp8", "group", group_size=128)
            case "mxfp8":
                return ActivationScheme("fp8", "group", group_size=32)
        return ActivationScheme("fp8", "tensor", dynamic=self.scheme != "fp8-static")

    @property
    def kv_scheme(self) -> KVScheme | None:
        if self.kv_cache is None or self.kv_cache == INT4_KV.dtype:
            return None if self.kv_cache is None else INT4_KV
        return KVScheme(self.kv_cache, self.kv_granularity)

    @property
    def float_samples(self) -> int:
        """Calibration samples for which the float model is followed. It is all of them: with other samples than the
        Hessian's, the regression on the drift would fit noise."""
        return self.samples if self.algorithm.compensates and self.effort != "fast" and self.tokens else 0

    @property
    def learns_rounding(self) -> bool:
        """Whether codes are learned after error compensation. Those of a trellis are not: a code shares bits."""
        return self.effort == "best" and self.scheme == "weights"

    @property
    def tokens(self) -> int:
        """Calibration tokens, 0 without calibration."""
        return self.samples * self.sequence_length if self.text is not None else 0
