"""``Engine``: a scheduler, a model runner and a tokenizer; text in, text out. One step fits on one screen.

Owned by one thread. Knows requests and text; does not know HTTP, nor how a step is computed.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from llguidance import LLMatcher
from torch import Tensor

from qserve.checkpoint.source import ModelSource, open_model
from qserve.kernels import registry
from qserve.kernels.ops import BLOCK_SIZE
from qserve.kernels.threads import torch_threads
from qserve.runtime.beam import Beam, BeamSearch
from qserve.runtime.blocks import BlockManager
from qserve.runtime.config import EngineConfig
from qserve.runtime.detokenizer import Detokenizer, StopChecker
from qserve.runtime.grammar import GrammarCompiler, Vocabulary
from qserve.runtime.grammar_state import GrammarState, MaskPool
from qserve.runtime.journal import Journal
from qserve.runtime.memory import MemoryPlan, plan_memory, weight_bytes
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.models.kv_cache import cache_dtype
from qserve.runtime.models.rope import context_limit
from qserve.runtime.plan import RequestUpdate, StepPlan
from qserve.runtime.pooling import Pool
from qserve.runtime.request import Request
from qserve.runtime.runner import DecoderRunner, ModelRunner
from qserve.runtime.sampler import Sampled, TokenLogprobs, prompt_logprobs, sample
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.scheduler import Scheduler, SchedulerConfig
from qserve.runtime.snapshot import EngineSnapshot, take


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one choice of a request. ``text`` and ``token_ids`` are the new part only.

    ``finish_reason``: stop, length, abort, timeout or error; None while it goes on. ``stop_reason``: the stop string or
    token that ended it. ``queue_seconds``: from arrival to the first step that held it.
    ``prompt_logprobs``: of the prompt's tokens from the second on, with the first output of a request that asked for
    ``prompt_logprobs`` and for ``num_prompt_logprobs`` or ``logprobs``. ``embedding``: where ``pooling`` was asked for.
    ``error_param``: the field of the request that is at fault for the error, where one is.
    A beam search outputs each of its n choices once, whole, when it is over.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_seconds: float
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: list[float] | None = None
    error_param: str | None = None


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; counters count since start."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    waiting_tokens: int
    kv_fragmentation: float = 0.0  # share of the allocated KV positions that hold nothing, 0 to 1


@dataclass
class _Choice:
    """One of the n sequences of a request, with the state of its text."""

    request_id: str
    index: int
    sequence: Request
    seed: int
    detokenizer: Detokenizer
    stops: StopChecker
    grammar: GrammarState | None
    deadline: float = math.inf
    search: BeamSearch | None = None
    pool: Pool | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Engine:
    """Serves one model. Not thread-safe: submit, abort and step belong to one thread.

    Raises ``CheckpointError`` or ``CapacityError`` where the model cannot be read or cannot fit.
    """

    def __init__(
        self,
        model: str | ModelSource,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.source = source = open_model(model) if isinstance(model, str) else model
        self.model_name = source.name
        self.model_config = decoder_config(source.config, source.name)
        self.vocab_size = self.model_config.vocab_size
        self.tokenizer = source.tokenizer()
        self.executor = registry.make(config.kernels, config.threads)
        kv_dtype = cache_dtype(config.kv_cache_dtype, source)
        int8_head = source.spec is not None and config.head != "dense"
        limits = DecoderLimits(config.max_num_batched_tokens, config.max_num_seqs, 0, 0)
        self.memory: MemoryPlan = plan_memory(
            self.model_config,
            weights=weight_bytes(source, int8_head=int8_head),
            workspace=limits.workspace_bytes(self.model_config),
            kv_dtype=kv_dtype,
            context=context_limit(self.model_config),
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            kv_cache_memory=config.kv_cache_memory,
        )
        self.max_model_len = self.memory.max_model_len
        decoder = Decoder(
            source,
            self.model_config,
            self.executor,
            replace(limits, max_positions=self.max_model_len, num_blocks=self.memory.num_blocks),
            kv_dtype=kv_dtype,
            int8_head=int8_head,
            progress=progress,
        )
        self.runner: ModelRunner = DecoderRunner(decoder)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=self.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
            ),
            BlockManager(self.memory.num_blocks, BLOCK_SIZE, config.enable_prefix_caching),
        )
        self.journal = Journal()
        self._eos = _eos_token_ids(source)
        self.grammars = GrammarCompiler(partial(Vocabulary.of, self.tokenizer, self.vocab_size, self._eos))
        self._masks = MaskPool(self.vocab_size)
        self._clock = clock
        self._arrivals = count()
        self._choices: dict[str, _Choice] = {}  # by the id of the scheduler's request
        self._sinks: dict[str, Callable[[int, Tensor], None]] = {}
        self.last_plan: StepPlan | None = None  # what the newest step ran, for those who watch

    def submit(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        weight: float = 1.0,
        matcher: LLMatcher | None = None,
    ) -> int:
        """Queue a request and return the number of its prompt tokens.

        ``tenant`` is whose it is; where work waits, tenants are served in proportion to their ``weight``.
        ``matcher``: of the constraint, where ``grammars`` has compiled it already.

        Raises ``RequestError``, naming the field, for what can never run; ``QueueFullError`` for what may be sent
        again later. Either all of its n choices are queued or none.
        """
        tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
        if not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in tokens):
            raise RequestError(f"a token id is outside 0..{self.vocab_size - 1}", "prompt")
        self._check_vocabulary(params)
        if any(choice.request_id == request_id for choice in self._choices.values()):
            raise RequestError(f"request id {request_id} is in use", "request_id")
        if params.n > self.config.max_waiting:
            raise RequestError(
                f"n {params.n} exceeds the {self.config.max_waiting} that may wait; raise --max-waiting", "n"
            )
        self.scheduler.require_room(tenant, params.n, len(tokens))
        constraint = params.constraint
        if constraint is not None:
            matcher = matcher or self.grammars.matcher(constraint)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        parent: Request | None = None
        now = self._clock()
        for index in range(1 if params.use_beam_search else params.n):
            request = Request(
                _key(request_id, index),
                tuple(tokens),
                params,
                eos_token_ids=self._eos,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                weight=weight,
                arrival=next(self._arrivals),
                arrival_time=now,
                parent=parent,
            )
            choice = _Choice(
                request_id,
                index,
                request,
                (seed + index + 2**63) % 2**64 - 2**63,
                Detokenizer(self.tokenizer, tokens, visible=params.visible_tokens),
                StopChecker(params.stop, params.include_stop_str_in_output),
                GrammarState(matcher.deep_copy(), self.grammars.tokenizer, constraint.param)
                if constraint is not None and matcher is not None
                else None,
                deadline=math.inf if params.timeout is None else now + params.timeout,
                pool=None if params.pooling is None else Pool(params.pooling),
            )
            self.scheduler.add(request)  # the first is refused where any would be
            if params.use_beam_search:
                choice.search = BeamSearch(
                    params, request.endings, request.max_output_tokens, {request.request_id: Beam()}
                )
            self._choices[request.request_id] = choice
            parent = parent or request
        return len(tokens)

    def abort(self, request_id: str) -> None:
        """End every choice of a request at once; its blocks are free. Nothing is output for it any more."""
        for key in [key for key, choice in self._choices.items() if choice.request_id == request_id]:
            self.scheduler.abort(key)
            self._forget(key)

    def step(self) -> list[RequestOutput]:
        """Run one step of the model and return what it added to each request, in no particular order.

        Where the model raises, every request ends, the engine is as good as new, and the error goes on to the caller.
        """
        now = self._clock()
        outputs = self._end_late(now)
        self.last_plan = plan = self.scheduler.schedule(now)
        if plan is None:
            return outputs
        self.journal.step(plan, now)
        try:
            live, sampled = self._run(plan)
            results = dict(zip((choice.sequence.request_id for choice in live), sampled))
            for choice, token in zip(live, sampled):
                if token.token_id is None and not choice.sequence.is_finished:  # beams end together
                    outputs += self._break_off(choice)
            tokens = {key: token.token_id for key, token in results.items() if token.token_id is not None}
            forks = []
            for choice, search in _searches(live):
                turn = search.advance({key: results[key].candidates for key in search.beams})
                tokens |= turn.tokens
                forks += [(choice, search, *fork) for fork in turn.forks]
                outputs += [] if turn.tokens else self._found(choice, search)
                self._drop(turn.ended)
            updates = self.scheduler.commit(plan, tokens)
            for fork in forks:
                self._fork(*fork)
            for update in updates:
                choice = self._choices[update.request_id]
                if not choice.search:
                    outputs.append(self._advance(choice, update, results[update.request_id]))
            return outputs
        except BaseException:  # Ctrl-C too: whoever catches it may go on with this engine
            for key in list(self._choices):
                self.scheduler.finish(key, "error")
                self._forget(key)
            if self.scheduler.num_in_flight:
                self.scheduler.commit(plan, {})
            raise

    def _run(self, plan: StepPlan) -> tuple[list[_Choice], list[Sampled]]:
        """Who gets a token from this plan, and which."""
        masks = self._masks.start(
            {
                planned.request_id: grammar
                for planned in plan.sequences
                if planned.num_sampled and (grammar := self._choices[planned.request_id].grammar)
            }
        )
        with torch_threads(1):
            output = self.runner.run(plan, self._deliver)
            live = [self._choices[key] for key in output.request_ids]
            sequences, seeds = [choice.sequence for choice in live], [choice.seed for choice in live]
            allowed = [masks[key].result() if key in masks else None for key in output.request_ids]
            return live, sample(output.logits, output.greedy, sequences, seeds, allowed)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def generate(self, prompts: list[str | list[int]], params: list[SamplingParams]) -> Iterator[RequestOutput]:
        """Run requests to their end, yielding what each step adds; the id of a request is its place in the list.

        For an engine that serves nobody else. Prompts beyond the queue's limit wait outside it.
        """
        tokens = [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        todo = list(zip(map(str, count()), tokens, params))[::-1]
        try:
            while todo or self.has_work():
                while todo and self._has_room(todo[-1][2].n, len(todo[-1][1])):
                    self.submit(*todo.pop())
                yield from self.step()
        finally:
            for request_id in {choice.request_id for choice in self._choices.values()}:
                self.abort(request_id)

    def score(self, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
        """The log-probabilities that follow each token of a prompt, a chunk at a time.

        Yields ``(position, float32 [n, vocab])``: row i predicts the token at position + i + 1. For an engine that
        serves nobody else; it is the path that serves, so what is measured here is what users get.
        """
        chunks: list[tuple[int, Tensor]] = []
        self.submit("score", tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True))
        self._sinks[_key("score", 0)] = lambda start, rows: chunks.append((start, rows.clone()))
        try:
            while self.has_work():
                self.step()
                yield from chunks
                chunks.clear()
        finally:
            self._sinks.clear()
            self.abort("score")

    def _has_room(self, choices: int, prompt_tokens: int) -> bool:
        """Whether as many more may wait; what never may is let through, to be refused."""
        return choices > self.config.max_waiting or self.scheduler.backlog.has_room("", choices, prompt_tokens)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the special tokens that the model expects around it."""
        return list(self.tokenizer(text)["input_ids"])

    def stats(self) -> EngineStats:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_blocks_total=blocks.num_blocks,
            kv_blocks_used=blocks.num_used,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            waiting_tokens=scheduler.backlog.tokens,
            kv_fragmentation=min(1.0, scheduler.num_unused_slots / max(1, blocks.num_used * blocks.block_size)),
        )

    def snapshot(self) -> EngineSnapshot:
        """Requests, blocks and the last steps as they are between two steps."""
        return take(self.scheduler, self.journal, self._clock())

    def check(self) -> None:
        """Raise ``AssertionError`` where the scheduler, its blocks and the choices disagree."""
        self.scheduler.check()
        assert all(not choice.sequence.is_finished for choice in self._choices.values())
        assert self._choices.keys() == self.scheduler.request_ids(), "a request has no text, or a text no request"

    def _deliver(self, key: str, start: int, rows: Tensor) -> None:
        choice = self._choices[key]
        prompt = choice.sequence.prompt_token_ids
        rows = rows[: len(prompt) - start]
        if key in self._sinks:
            self._sinks[key](start, rows)
            return
        if choice.pool is not None:
            choice.pool.add(rows)
            return
        params = choice.sequence.params
        count = params.logprobs if params.num_prompt_logprobs is None else params.num_prompt_logprobs
        if count is not None:
            following = prompt[start + 1 : start + 1 + len(rows)]
            choice.prompt_logprobs += prompt_logprobs(rows, following, count)

    def _advance(self, choice: _Choice, update: RequestUpdate, sampled: Sampled) -> RequestOutput:
        """Turn a new token into text; a stop string in it ends the request."""
        if choice.pool is not None:
            return self._pooled(choice, choice.pool)
        reason, stop_reason = update.finish_reason, update.stop_reason
        tokens = list(update.token_ids)
        if len(choice.sequence.output_token_ids) == 1 and choice.index == 0:
            now = self._clock()
            self.journal.first_token(now, now - choice.sequence.arrival_time)
        # A token that ended the request is not part of the answer's text.
        shown = tokens if reason != "stop" else []
        if choice.grammar is not None and reason != "stop":
            choice.grammar.consume(tokens[-1])
            if choice.grammar.is_complete:  # also by an ending that the request itself would have passed over
                self.scheduler.finish(update.request_id, "stop")
                reason, shown = "stop", [token for token in tokens if token not in self._eos]
        text = choice.detokenizer.append(shown)
        # Stop strings count from the first token after ``min_tokens`` on.
        if len(choice.sequence.output_token_ids) > choice.sequence.params.min_tokens:
            text = choice.stops.append(text)
        if reason is not None:
            text += choice.stops.append(choice.detokenizer.flush())
        if choice.stops.matched is not None:
            if reason is None:
                self.scheduler.finish(update.request_id, "stop", choice.stops.matched)
            reason, stop_reason = "stop", choice.stops.matched
        if reason is not None:
            text += choice.stops.flush()
            self._forget(update.request_id)
        logprobs = None if sampled.logprobs is None else [sampled.logprobs]
        return self._output(choice, text, tokens, logprobs, reason, stop_reason)

    def _pooled(self, choice: _Choice, pool: Pool) -> RequestOutput:
        """The end of a request for an embedding; the token it sampled is nobody's."""
        self._forget(choice.sequence.request_id)
        try:
            output = self._output(choice, "", [], None, "stop", None)
            return replace(output, embedding=pool.vector(), output_tokens=0)
        except ValueError as error:
            return self._output(choice, "", [], None, "error", None, str(error))

    def _fork(self, choice: _Choice, search: BeamSearch, parent: str, beam: Beam) -> None:
        key = f"{choice.request_id}#beam{next(self._arrivals)}"
        sequence = self.scheduler.fork(parent, key, beam.token_ids[-1])
        search.beams[key] = beam
        self._choices[key] = replace(choice, sequence=sequence)

    def _found(self, choice: _Choice, search: BeamSearch) -> list[RequestOutput]:
        """The outputs of a beam search that is over."""
        params, outputs = search.params, []
        for index, beam in enumerate(search.finished):
            tokens, end = list(beam.token_ids), beam.stop_token
            detokenizer = Detokenizer(
                self.tokenizer, choice.sequence.prompt_token_ids, visible=params.visible_tokens
            )
            text = detokenizer.append(tokens if end is None else tokens[:-1]) + detokenizer.flush()
            logprobs = None if params.logprobs is None else list(beam.logprobs)
            shown = end if params.ignore_eos or end not in self._eos else None
            output = self._output(choice, text, tokens, logprobs, "length" if end is None else "stop", shown)
            outputs.append(replace(output, index=index, output_tokens=len(tokens)))
        return outputs

    def _end_late(self, now: float) -> list[RequestOutput]:
        """End what is past its deadline, waiting or running."""
        outputs: list[RequestOutput] = []
        for choice in [choice for choice in self._choices.values() if choice.deadline <= now]:
            if not choice.sequence.is_finished:  # with another beam
                limit = choice.sequence.params.timeout
                outputs += self._fail(choice, "timeout", f"the request was not done within its timeout of {limit:g} s")
        return outputs

    def _break_off(self, choice: _Choice) -> list[RequestOutput]:
        """End a choice that has no token to choose."""
        grammar = choice.grammar
        if grammar is not None and grammar.error is not None:
            error = f"the output cannot go on within its constraint: {grammar.error}"
            return self._fail(choice, "error", error, grammar.param)
        return self._fail(choice, "error", "the model computed NaN for this request")

    def _fail(self, choice: _Choice, reason: str, error: str, param: str | None = None) -> list[RequestOutput]:
        """End a choice, or a whole beam search, without a further token."""
        beams = list(choice.search.beams) if choice.search else [choice.sequence.request_id]
        for key in beams:
            self.scheduler.finish(key, reason)
            self._forget(key)
        output = self._output(choice, "", [], None, reason, None, error, param)
        return [replace(output, index=i) for i in range(choice.search.params.n)] if choice.search else [output]

    def _drop(self, keys: list[str]) -> None:
        """End beams that do not go on."""
        for key in keys:
            self.scheduler.finish(key, "stop")
            self._forget(key)

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for token, _ in params.biases:
            if token >= self.vocab_size:
                raise RequestError(
                    f"logit_bias holds token {token}, the ids are 0..{self.vocab_size - 1}", "logit_bias"
                )
        if params.use_beam_search and params.n + len(self._eos) + len(params.stop_token_ids) > self.vocab_size:
            raise RequestError(f"a beam search of width {params.n} needs a larger vocabulary", "n")

    def _forget(self, key: str) -> None:
        self._choices.pop(key, None)
        self._sinks.pop(key, None)

    def _output(
        self,
        choice: _Choice,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        reason: str | None,
        stop_reason: str | int | None,
        error: str | None = None,
        error_param: str | None = None,
    ) -> RequestOutput:
        sequence = choice.sequence
        scored, choice.prompt_logprobs = choice.prompt_logprobs, []
        return RequestOutput(
            request_id=choice.request_id,
            index=choice.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached,
            output_tokens=len(sequence.output_token_ids),
            queue_seconds=(sequence.scheduled_time or sequence.arrival_time) - sequence.arrival_time,
            error=error,
            prompt_logprobs=scored or None,
            error_param=error_param,
        )


def _searches(live: list[_Choice]) -> list[tuple[_Choice, BeamSearch]]:
    """The beam searches among those that ran, all beams of which did, each with one of its beams."""
    found = {id(each.search): (each, each.search) for each in live if each.search and not each.sequence.is_finished}
    return list(found.values())


def _key(request_id: str, index: int) -> str:
    return f"{request_id}#{index}"


def _eos_token_ids(source: ModelSource) -> frozenset[int]:
    """From the generation configuration, the model's, and the tokenizer: any of them ends an answer."""
    found: set[int] = set()
    for value in (
        source.generation_config().get("eos_token_id"),
        source.config.get("eos_token_id"),
        source.tokenizer().eos_token_id,
    ):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
