"""``Eagle3Head``: an EAGLE-3 head that guesses what comes next, and its own cache of keys and values.

Knows names, tokens, positions and hidden states; does not know requests, or when a guess is worth its time
(``Eagle3Drafter``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.checkpoint.source import ModelSource, open_model
from qserve.kernels import registry
from qserve.kernels.executor import HOST
from qserve.kernels.ops import BLOCK_SIZE
from qserve.kernels.threads import torch_threads
from qserve.runtime.backend import CacheDescription, Limits, LoadedModel
from qserve.runtime.cache import blocks_needed
from qserve.runtime.config import EngineConfig
from qserve.runtime.draft_model import CACHE_SHARE, DraftModel, Span
from qserve.runtime.hidden_states import HiddenStates
from qserve.runtime.memory import MemoryPlan, available_memory, block_bytes_of
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import DecoderLimits
from qserve.runtime.models.eagle3 import Eagle3Decoder
from qserve.runtime.models.eagle3_config import eagle3_config
from qserve.runtime.models.rope import context_limit
from qserve.runtime.models.weights import Weights
from qserve.runtime.parallel.support import rank_of_engine, threads_of
from qserve.runtime.runner import PromptSink, StepOutput
from qserve.runtime.step_arrays import StepArrays
from qserve.runtime.step_plan import StepPlan

GUESSES = 64  # rows of a step that are asked what follows them, at least
WAITING = 64  # states of a request, besides those of a draft


class _Runner:
    """Runs plans on a head. ``states``: float32 [tokens of the next plan, …] of the target, to be multiplied by
    ``scale``; None where each sequence goes on by one guess."""

    def __init__(self, decoder: Eagle3Decoder, scale: float) -> None:
        self.decoder = decoder
        self.states: Tensor | None = None
        self._arrays, self._scale = StepArrays(), scale
        self._outputs: dict[str, Tensor] = {}  # of the last token of each sequence in the last step

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        assert not plan.copies, "no block is shared"
        decoder = self.decoder
        (step,) = self._arrays.describe(plan, {})
        if self.states is not None:
            torch.mul(self.states, self._scale, out=decoder.states[: step.tokens])
            decoder.combine(step)
        else:
            decoder.features[: step.tokens] = torch.stack([self._outputs[each.request_id] for each in plan.sequences])
        decoder.run(step)
        decoder.head(step)
        ends = torch.from_numpy(step.seq_start.numpy()[1:] - 1)
        self._outputs = dict(zip([each.request_id for each in plan.sequences], decoder.x.index_select(0, ends)))
        greedy = decoder.greedy[: step.logits]
        return StepOutput(plan.rows, greedy[:, None], greedy)


class Eagle3Head(DraftModel):
    """``hidden_layers`` are those of the target whose inputs it reads; ``waiting`` holds what it did not read yet. Its
    guesses are tokens of the target: for each of its own, ``targets`` has one."""

    kind = "EAGLE-3 head"

    def __init__(
        self, loaded: LoadedModel, runner: _Runner, waiting: HiddenStates, targets: Sequence[int], name: str
    ) -> None:  # fmt: skip
        super().__init__(loaded, name, enable_prefix_caching=False)
        self.hidden_layers, self.waiting = runner.decoder.config.hidden_layers, waiting
        self._head, self._targets = runner, targets

    @classmethod
    def load_head(cls, model: str, config: EngineConfig, target: ModelSource) -> Eagle3Head:
        """Load the head ``model`` for ``target``, which is served as ``config`` says. Do it before the target is
        loaded: all memory is then in use, so the target is planned for what is left.

        Raises ``CheckpointError`` for what is no such head, or of another model; ``UsageError`` on a GPU;
        ``CapacityError`` where it does not fit.
        """
        source, of = open_model(model), decoder_config(target.config, target.name)
        shape = eagle3_config(source.config, source.name, of)
        threads, cpus = threads_of(config, rank_of_engine(config))
        executor = registry.make(config.kernels, threads, cpus=cpus)
        if executor.placement != HOST:
            raise UsageError("an EAGLE-3 head is computed on a CPU alone: choose --kernels native, or another method "
                             "of --speculative-config")
        layout, context = shape.layers.cache_layout, context_limit(shape.layers)
        context = min(context, config.max_model_len or context)
        block_bytes = block_bytes_of(layout, torch.float16)
        most = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        rings = config.max_num_seqs, WAITING + most, len(shape.hidden_layers) * shape.hidden_size
        wanted, free = config.max_num_seqs * blocks_needed(context, BLOCK_SIZE, (0,)), available_memory()
        num_blocks = min(wanted, max(1, free // CACHE_SHARE // block_bytes))
        context = min(context, num_blocks * BLOCK_SIZE)
        limits = DecoderLimits(config.step_tokens(False), max(config.max_num_seqs, GUESSES), context, num_blocks)
        weights, cache, waiting = source.stored_bytes(), num_blocks * block_bytes, HiddenStates.bytes_of(*rings)
        if weights + cache + waiting > free:
            raise CapacityError(f"{cls.kind} {source.name} does not fit: {weights / 2**20:.1f} MiB weights + "
                                f"{cache / 2**20:.1f} MiB KV cache + {waiting / 2**20:.1f} MiB hidden states exceed "
                                f"the {free / 2**20:.1f} MiB of memory available; lower --max-num-seqs")
        table = None
        if shape.layers.hidden_size == of.hidden_size:
            table, _ = Weights(target).linear(of.modules.embedding, of.vocab_size, of.hidden_size)
        decoder = Eagle3Decoder(source, shape, executor, limits, table)
        memory = MemoryPlan(weights, decoder.nbytes - cache + waiting, cache, free, num_blocks, limits.max_positions)
        runner = _Runner(decoder, of.multipliers.residual)
        loaded = LoadedModel(
            runner,
            CacheDescription(num_blocks, BLOCK_SIZE),
            Limits(of.vocab_size, shape.layers.hidden_size, limits.max_positions, limits.max_tokens, limits.max_logits),
            memory,
            executor.name,
        )
        targets = _targets(source, shape.layers.vocab_size, of.vocab_size).tolist()
        return cls(loaded, runner, HiddenStates(*rings), targets, source.name)

    def run(self, spans: Sequence[Span]) -> list[list[int]]:
        """As that of a draft model. Spans have hidden states, or each is one guess behind a span of the last run."""
        states = [span.states for span in spans if span.states is not None]
        assert len(states) in (0, len(spans)), "guesses and tokens that came are computed apart"
        with torch_threads(1):
            self._head.states = torch.cat(states) if states else None
        return [[self._targets[guess] if guess >= 0 else -1 for guess in found] for found in super().run(spans)]


def _targets(source: ModelSource, drafts: int, vocab_size: int) -> Tensor:
    """int64 [drafts]: the token of the target that each guess stands for."""
    own = torch.arange(drafts)
    if not source.has("d2t"):
        if drafts != vocab_size:
            raise CheckpointError(f"{source.name} drafts {drafts} of {vocab_size} tokens without naming them (d2t)")
        return own
    offsets = source.tensor("d2t").long()
    if offsets.shape != own.shape or not bool(((own + offsets >= 0) & (own + offsets < vocab_size)).all()):
        raise CheckpointError(f"{source.name}: d2t does not name {drafts} of {vocab_size} tokens")
    return own + offsets
