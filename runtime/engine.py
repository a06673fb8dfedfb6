"""``Engine``: a scheduler, a model runner and a tokenizer; text in, text out. One step fits on one screen.

One thread owns it. HTTP, the computation of a step (``ModelRunner``) and the text of tokens (``Choice``) are elsewhere.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from random import Random, SystemRandom

from llguidance import LLMatcher
from torch import Tensor

from qserve.checkpoint.source import ModelSource, open_model
from qserve.kernels.threads import torch_threads
from qserve.runtime.adapters import Adapter, AdapterPool
from qserve.runtime.backend import Backend
from qserve.runtime.backend_choice import backend_for
from qserve.runtime.bad_words import bad_word_tokens
from qserve.runtime.beam import Beam, BeamSearch
from qserve.runtime.blocks import BlockManager
from qserve.runtime.choice import Choice
from qserve.runtime.config import EngineConfig
from qserve.runtime.draft_model import DraftModel
from qserve.runtime.drafter import Drafter, NGramDrafter
from qserve.runtime.eagle3_drafter import Eagle3Drafter
from qserve.runtime.eagle3_head import Eagle3Head
from qserve.runtime.generation_config import GenerationConfig
from qserve.runtime.grammar import GrammarCompiler, Vocabulary
from qserve.runtime.grammar_state import GrammarState, MaskPool
from qserve.runtime.journal import Journal
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.memory import MemoryPlan, available_memory
from qserve.runtime.model_drafter import ModelDrafter
from qserve.runtime.offload import Offload
from qserve.runtime.output import RequestOutput
from qserve.runtime.request import Request
from qserve.runtime.runner import ModelRunner
from qserve.runtime.sampler import Sampled
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.scheduler import NO_DRAFTS, Scheduler
from qserve.runtime.snapshot import EngineSnapshot, take
from qserve.runtime.state_slots import StateSlots
from qserve.runtime.stats import EngineStats
from qserve.runtime.step_in_flight import StepInFlight
from qserve.runtime.step_plan import RequestUpdate

logger = logging.getLogger(__name__)

GRAMMAR_DRAFTS = 4
"""Requests in a step up to which those with a constraint have drafts: to ask a grammar takes 30 to 60 us each."""
_DISK_WAIT = 0.05  # seconds; then a caller may abort


class Engine:
    """Serves one model. Not thread-safe: submit, abort and step belong to one thread.

    ``backend``: what computes the model, by default what ``config`` asks for. ``kernels`` names what it runs on;
    ``notes`` say, in lines, how a GPU divides its products and which operations have no kernel.
    ``drafter``: asked before each step which tokens come next, by default as ``config.speculative_config`` says. Its
    answers never change an output.
    ``overlaps``: whether a step may begin before the tokens of the last are known; turn it off to time single steps.

    Raises ``CheckpointError`` or ``CapacityError`` where the model cannot be read or cannot fit.
    """

    def __init__(
        self,
        model: str | ModelSource,
        config: EngineConfig | None = None,
        *,
        backend: Backend | None = None,
        progress: Callable[[int, int], None] | None = None,
        planned: Callable[[MemoryPlan], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.source = source = open_model(model) if isinstance(model, str) else model
        self.model_name = source.name
        self.tokenizer = source.tokenizer()
        self.generation_config = GenerationConfig.of(source, config.generation_config)
        drafts = config.speculative_config
        draft_model: DraftModel | None = None
        if drafts is not None and drafts.model is not None and drafts.method == "eagle3":
            draft_model = Eagle3Head.load_head(drafts.model, config, source)
        elif drafts is not None and drafts.model is not None:
            draft_model = DraftModel.load(drafts.model, config, source, self.tokenizer.get_vocab())
        loaded = (backend or backend_for(source, config)).load(
            source, config, progress, planned, draft_model.hidden_layers if isinstance(draft_model, Eagle3Head) else ()
        )
        self.runner: ModelRunner = loaded.runner
        self.classifier, self._generates = loaded.classifier, loaded.generates
        self.limits, self.memory = loaded.limits, loaded.memory
        self.kernels, self.notes, self._gpu, self._ranks = loaded.kernels, loaded.notes, loaded.gpu, loaded.ranks
        self._pipeline = loaded.pipeline
        self.adapters = AdapterPool(loaded.lora, loaded.gpu.available if loaded.gpu else available_memory)
        self.vocab_size, self.max_model_len = loaded.limits.vocab_size, loaded.limits.max_model_len
        try:
            for name, path in config.lora_modules:
                self.adapters.add(name, path, self.adapters.read(path))
            self.offload = Offload(source, config, loaded) if config.offload_memory else None
        except BaseException:
            if self._ranks:
                self._ranks.stop()
            raise
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=self.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=loaded.limits.max_num_batched_tokens,
                max_num_logits=loaded.limits.max_num_logits,
                max_waiting=config.max_waiting,
                max_waiting_tokens=config.max_waiting_tokens,
                num_stages=loaded.pipeline.num_stages if loaded.pipeline else 1,
            ),
            BlockManager(
                loaded.cache.num_blocks, loaded.cache.block_size, config.enable_prefix_caching, loaded.cache.windows,
                self.offload.tiers if self.offload else None,
                StateSlots(config.max_num_seqs, config.num_snapshots, loaded.cache.block_size)
                if loaded.cache.keeps_states else None,
            ),
        )
        self.journal = Journal()
        self.eos_token_ids = self.generation_config.eos_token_ids
        self.grammars = GrammarCompiler(partial(Vocabulary.of, self.tokenizer, self.vocab_size, self.eos_token_ids))
        self._seeds = SystemRandom() if config.seed is None else Random(config.seed)
        self._masks = MaskPool(self.vocab_size)
        self._clock = clock
        self._arrivals = count()
        self._choices: dict[str, Choice] = {}  # by the id of the scheduler's request
        self._choices_of: dict[str, dict[str, Choice]] = {}  # the same, by the id of their own request first
        self._next_deadline = math.inf  # no choice is late before this time
        self._flights: deque[StepInFlight] = deque()  # oldest first; several where steps overlap
        self._ended: list[RequestOutput] = []  # while a step was run, to be output by it
        self._landed = 0.0  # when the last step did, on the clock
        self.overlaps = loaded.asynchronous
        self.drafter: Drafter | None = None
        most = self.scheduler.config.logits_limit
        if draft_model is not None and drafts is not None:
            if isinstance(draft_model, Eagle3Head):
                self.drafter = Eagle3Drafter(draft_model, drafts, most, self.vocab_size)
            else:
                self.drafter = ModelDrafter(draft_model, drafts, most, self.vocab_size)
            self.notes += (draft_model.note,)
        elif drafts is not None:
            self.drafter = NGramDrafter(drafts, most)

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
        adapter: str | Adapter | None = None,
    ) -> int:
        """Queue a request and return the number of its prompt tokens.

        ``tenant`` owns the request; if work waits, tenants are served in proportion to their ``weight``.
        ``matcher``: for the constraint, if ``grammars`` has compiled it already. ``adapter``: a
        loaded one, or its name.

        Raises ``RequestError``, naming the field, for a request that can never run, and ``QueueFullError`` for one that
        may be sent again later. Either all of its n choices are queued or none.
        """
        tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
        # Three passes in C: a long prompt must not hold up the next step.
        if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= self.vocab_size):
            raise RequestError(f"a token id is outside 0..{self.vocab_size - 1}", "prompt")
        tokens = params.kept(tokens, self.max_model_len)
        self._check_vocabulary(params)
        self._check_pooling(params)
        if request_id in self._choices_of:
            raise RequestError(f"request id {request_id} is in use", "request_id")
        if params.n > self.config.max_waiting:
            raise RequestError(
                f"n {params.n} exceeds the {self.config.max_waiting} that may wait; raise --max-waiting", "n"
            )
        slot = -1
        if adapter is not None:
            found = self.adapters.find(adapter) if isinstance(adapter, str) else adapter
            slot, cache_salt = found.slot, found.salt(cache_salt)
        constraint = params.constraint
        if constraint is not None:
            matcher = matcher or self.grammars.matcher(constraint)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        bad_words = bad_word_tokens(self.tokenizer, params.bad_words)
        parent: Request | None = None
        now = self._clock()
        for index in range(1 if params.use_beam_search else params.n):
            request = Request(
                _key(request_id, index),
                tuple(tokens),
                params,
                eos_token_ids=self.eos_token_ids,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                weight=weight,
                arrival=next(self._arrivals),
                arrival_time=now,
                parent=parent,
                bad_words=bad_words,
                adapter=slot,
            )
            choice = Choice(
                request_id,
                index,
                request,
                self.tokenizer,
                seed=(seed + index + 2**63) % 2**64 - 2**63,
                head=self.classifier.weight if params.pooling == "classify" and self.classifier else None,
                grammar=GrammarState(matcher.deep_copy(), self.grammars.tokenizer, constraint.param)
                if constraint is not None and matcher is not None
                else None,
            )
            self.scheduler.add(request)  # the first is refused if any would be
            if params.use_beam_search:
                choice.begin_search()
            self._hold(choice)
            self._next_deadline = min(self._next_deadline, choice.deadline)
            parent = parent or request
        return len(tokens)

    def abort(self, request_id: str) -> None:
        """End every choice of a request at once; its blocks are free. Nothing is output for it any more."""
        for key in list(self._choices_of.get(request_id, ())):
            self._end(key, "abort")

    def abort_all(self) -> None:
        """End every choice of every request at once."""
        for key in list(self._choices):
            self._end(key, "abort")

    def step(self) -> list[RequestOutput]:
        """Run one step of the model and return what it added to each request, in no particular order.

        If the executor is asynchronous and the step's tokens can be chosen on the device, the next step begins before
        they are known, and is computed while they become text. For a choice that they end it is computed in vain. Steps
        with drafts do not overlap: where the next one begins is known when it is known which guesses were right. Where
        a pipeline runs the steps, one begins for each of its stages.

        What fails on the rows, the mask, the tokens or the text of one request ends that request, and the log says why.
        If the model raises, every request ends, the engine is as good as new, and the caller gets the error.
        """
        now = self._clock()
        outputs = self._end_late(now)
        try:
            if not self._flights and not self._launch(now):
                outputs, self._ended = outputs + self._ended, []
                if self.offload:
                    self.offload.settle(_DISK_WAIT)
                return outputs
            flight = self._flights[0]
            if flight.is_chosen and not self._waits_for_drafts(flight):
                self._launch(now)
            while len(self._flights) < self.scheduler.config.num_stages and self._launch(now):
                pass
            runs = {choice.sequence.request_id: run for choice, run in zip(flight.choices, flight.land())
                    if not choice.sequence.is_finished}  # it may have ended since the step began
            began, self._landed = max(flight.began, self._landed), self._clock()
            if self.offload:
                self.offload.begin(flight.transfers)
                flight.transfers = ()
                self.offload.landed(flight.plan, self._landed - began)
            if self.drafter is not None and flight.plan.is_decode:
                self.drafter.timed(flight.plan.num_tokens, self._landed - began)
            outputs, self._ended = outputs + self._ended, []
            tokens: dict[str, list[int]] = {}
            for key, run in runs.items():
                tokens[key] = [each.token_id for each in run if each.token_id is not None]
                if not tokens[key] and (stuck := self._choices.get(key)):  # beams end together
                    defect = run[-1].defect
                    outputs += self._break(stuck, defect) if defect else self._fail(stuck, "error", *stuck.impasse())
            forks = []
            for choice, search in self._searches(runs):
                try:
                    turn = search.advance({key: runs[key][0].candidates for key in search.beams})
                    outputs += [] if turn.tokens else choice.found()
                except Exception as error:
                    outputs += self._break(choice, error)
                    continue
                tokens |= {key: [token] for key, token in turn.tokens.items()}
                forks += [(choice, search, *fork) for fork in turn.forks]
                for key in turn.ended:
                    self._end(key, "stop")
            updates = self.scheduler.commit(flight.plan, tokens)
            self._flights.popleft()
            for fork in forks:
                self._fork(*fork)
            for update in updates:
                choice = self._choices[update.request_id]
                if not choice.search:
                    outputs += self._advance(choice, update, runs)
            return outputs
        except BaseException:  # Ctrl-C too: the caller may catch it and go on with this engine
            for key in list(self._choices):
                self._end(key, "error")
            flights, uncommitted = [*self._flights], self.scheduler.num_in_flight
            self._flights.clear()
            self._ended.clear()
            for flight in flights[len(flights) - uncommitted :]:
                self.scheduler.commit(flight.plan, {})
            if self.offload:
                for flight in flights:
                    self.offload.drop(flight.transfers)
                self.scheduler.forget()
            raise

    def _launch(self, now: float) -> bool:
        """Plan a step and begin it, if there is one."""
        if self.offload:
            self.offload.settle()
        plan = self.scheduler.schedule(now, self._drafts())
        if plan is None:
            self._transfer()
            return False
        sampling = [planned for planned in plan.sequences if planned.num_sampled]
        choices = [self._choices[planned.request_id] for planned in sampling]
        flight = StepInFlight(plan, choices, {}, threads=self.config.threads, began=self._clock())
        self._flights.append(flight)
        self.journal.step(plan, now)
        flight.masks = self._masks.start({
            planned.request_id: (choice.grammar, planned.draft)
            for choice, planned in zip(choices, sampling) if choice.grammar
        })
        with torch_threads(1):
            flight.output = self.runner.run(plan, self._take_rows)
            if isinstance(self.drafter, Eagle3Drafter) and flight.output.hidden:
                requests = {each.request_id: each for each in self.scheduler.running()}
                self.drafter.saw(plan, requests, flight.output.hidden)
            self._transfer()
            if self.overlaps:
                flight.choose()
        return True

    def _transfer(self) -> None:
        """Let the disk begin what it may once the plans made so far have copied blocks: when the last of them has
        landed, for stages of a pipeline may not even have begun."""
        if self.offload and self._flights:
            self._flights[-1].transfers += self.scheduler.transfers()
        elif self.offload:
            self.offload.begin(self.scheduler.transfers())

    def _take_rows(self, key: str, start: int, rows: Tensor) -> None:
        """The runner's prompt sink."""
        choice = self._choices.get(key)
        if choice is None:
            return  # it broke on the rows before these
        try:
            choice.take_rows(start, rows)
        except Exception as error:
            if choice.row_sink is not None:  # the caller's own
                raise
            self._ended += self._break(choice, error)

    def _drafts(self) -> Mapping[str, Sequence[int]]:
        """Drafts for the requests that can take one."""
        if self.drafter is None or self._flights:
            return NO_DRAFTS
        requests = self._drafting()
        drafts = dict(self.drafter.draft(requests))
        for choice in [self._choices[each.request_id] for each in requests if each.params.constraint is not None]:
            name, grammar = choice.sequence.request_id, choice.grammar
            guess = drafts.pop(name, ())
            if grammar is not None and len(requests) <= GRAMMAR_DRAFTS:
                try:
                    drafts[name] = grammar.draft(guess)
                except Exception as error:
                    self._ended += self._break(choice, error)
        return drafts

    def _waits_for_drafts(self, flight: StepInFlight) -> bool:
        """Whether the step after ``flight`` begins when the tokens of that are known, because it may have drafts."""
        if self.drafter is None:
            return False
        return any(s.num_sampled > 1 for s in flight.plan.sequences) or self.drafter.expects(self._drafting())

    def _drafting(self) -> list[Request]:
        """The requests that can take a draft, when their tokens are known."""
        return [request for request in self.scheduler.running() if request.is_decoding and not request.beams]

    @property
    def failure(self) -> str | None:
        """Why the engine cannot go on, where a rank of its model has ended."""
        return self._ranks.failure if self._ranks else None

    @property
    def can_fail(self) -> bool:
        """Whether there is a ``failure`` to be looked for while there is no work."""
        return self._ranks is not None

    def close(self) -> None:
        """Keep the KV cache on disk, where there is one, for the next engine, and end the other ranks. This engine must
        not be used any more."""
        try:
            if self.offload:
                self.offload.close(None if self.failure else self.scheduler.blocks.findable())
        finally:
            if self._ranks:
                self._ranks.stop()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def generate(
        self,
        prompts: list[str | list[int]],
        params: list[SamplingParams],
        adapters: Sequence[str | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Run requests to their end, yielding what each step adds; the id of a request is its place in the list.
        ``adapters``: the name of each prompt's.

        For an engine that serves nobody else. Prompts beyond the queue's limit wait outside it.
        """
        tokens = [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        adapters = [None] * len(tokens) if adapters is None else adapters
        todo = list(zip(map(str, count()), tokens, params, adapters))[::-1]
        try:
            while todo or self.has_work():
                while todo and self._has_room(todo[-1][2].n, len(todo[-1][1])):
                    request_id, prompt, asked, adapter = todo.pop()
                    self.submit(request_id, prompt, asked, adapter=adapter)
                yield from self.step()
        finally:
            self.abort_all()

    def score(self, tokens: list[int]) -> Iterator[tuple[int, Tensor]]:
        """The log-probabilities that follow each token of a prompt, a chunk at a time.

        Yields ``(position, float32 [n, vocab])``: row i predicts the token at position + i + 1. For an engine that
        serves nobody else; it is the path that serves, so what is measured here is what users get.
        """
        chunks: list[tuple[int, Tensor]] = []
        self.submit("score", tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        self._choices[_key("score", 0)].row_sink = lambda start, rows: chunks.append((start, rows.clone()))
        try:
            while self.has_work():
                self.step()
                yield from chunks
                chunks.clear()
        finally:
            self.abort("score")

    def _has_room(self, choices: int, prompt_tokens: int) -> bool:
        """Whether so many more may wait. Those that never may are let through, to be refused."""
        return choices > self.config.max_waiting or self.scheduler.backlog.has_room("", choices, prompt_tokens)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the special tokens that the model expects around it."""
        return list(self.tokenizer(text)["input_ids"])

    def stats(self) -> EngineStats:
        idle = self._pipeline.idle_ratios() if self._pipeline else ()
        return EngineStats.of(self.scheduler, self._gpu.use() if self._gpu else None, idle)

    def snapshot(self) -> EngineSnapshot:
        """Requests, blocks and the last steps, as they are between two steps."""
        return take(self.scheduler, self.journal, self._clock())

    def check(self) -> None:
        """Raise ``AssertionError`` where the scheduler, its blocks and the choices disagree."""
        self.scheduler.check()
        assert all(not choice.sequence.is_finished for choice in self._choices.values())
        self.adapters.check(Counter(slot for each in self._choices.values() if (slot := each.sequence.adapter) >= 0))
        assert self._choices.keys() == self.scheduler.request_ids(), "a request has no text, or a text no request"
        of_requests = {key: choice for choices in self._choices_of.values() for key, choice in choices.items()}
        assert self._choices == of_requests and all(self._choices_of.values())
        assert all(each.request_id == name for name, held in self._choices_of.items() for each in held.values())

    def _advance(
        self, choice: Choice, update: RequestUpdate, runs: Mapping[str, list[Sampled]]
    ) -> list[RequestOutput]:
        """Give a choice what a step made for it, and end it if its text ended."""
        if not choice.num_tokens and update.token_ids and choice.index == 0:
            now = self._clock()
            self.journal.first_token(now, now - choice.sequence.arrival_time)
        try:
            output = choice.advance(update, runs[update.request_id]) if update.token_ids else choice.embed()
        except Exception as error:
            return self._break(choice, error)
        if len(output.token_ids) > 1:
            self.journal.accepted(len(output.token_ids) - 1)
        if output.finish_reason is not None:
            self._end(update.request_id, output.finish_reason, output.stop_reason)
        return [output]

    def _searches(self, keys: Iterable[str]) -> list[tuple[Choice, BeamSearch]]:
        """The beam searches that ran, each with one of its choices. All beams of a search run in the same step."""
        live = [self._choices[key] for key in keys if key in self._choices]
        return list({id(choice.search): (choice, choice.search) for choice in live if choice.search}.values())

    def _fork(self, choice: Choice, search: BeamSearch, parent: str, beam: Beam) -> None:
        key = f"{choice.request_id}#beam{next(self._arrivals)}"
        sequence = self.scheduler.fork(parent, key, beam.token_ids[-1])
        search.beams[key] = beam
        self._hold(choice.fork(sequence))

    def _end_late(self, now: float) -> list[RequestOutput]:
        """End choices that are past their deadline, waiting or running."""
        outputs: list[RequestOutput] = []
        if now < self._next_deadline:
            return outputs
        for choice in [choice for choice in self._choices.values() if choice.deadline <= now]:
            if not choice.sequence.is_finished:  # with another beam
                limit = choice.sequence.params.timeout
                outputs += self._fail(choice, "timeout", f"the request was not done within its timeout of {limit:g} s")
        self._next_deadline = min((choice.deadline for choice in self._choices.values()), default=math.inf)
        return outputs

    def _break(self, choice: Choice, defect: BaseException) -> list[RequestOutput]:
        """End a choice, or a whole beam search, that the engine's own code failed on."""
        if not isinstance(defect, Exception):
            raise defect  # such as a panic of a library in Rust, which nobody knows the extent of
        logger.error("request %s failed", choice.request_id, exc_info=defect)
        return self._fail(choice, "error", "the engine failed on this request; its log says why")

    def _fail(self, choice: Choice, reason: str, error: str, param: str | None = None) -> list[RequestOutput]:
        """End a choice, or a whole beam search, without a further token."""
        for key in list(self._choices_of.get(choice.request_id, ())) if choice.search else [choice.sequence.request_id]:
            self._end(key, reason)
        return choice.fail(reason, error, param)

    def _hold(self, choice: Choice) -> None:
        key = choice.sequence.request_id
        self.adapters.hold(choice.sequence.adapter)
        self._choices[key] = self._choices_of.setdefault(choice.request_id, {})[key] = choice

    def _end(self, key: str, reason: str, stop_reason: str | int | None = None) -> None:
        """Drop all of a sequence, which may have ended by its own rules already."""
        self.scheduler.finish(key, reason, stop_reason)
        choice = self._choices.pop(key, None)
        if choice is not None:
            self.adapters.release(choice.sequence.adapter)
            others = self._choices_of[choice.request_id]
            del others[key]
            if not others:
                del self._choices_of[choice.request_id]

    def _check_pooling(self, params: SamplingParams) -> None:
        if params.pooling is None and not self._generates:
            raise RequestError("this model is a classifier and generates no text; use /classify, /score or /rerank")
        if params.pooling == "classify" and self.classifier is None:
            raise RequestError("this model has no classification head", "pooling")

    def _check_vocabulary(self, params: SamplingParams) -> None:
        allowed = params.allowed_token_ids or ()
        for name, ids in (("logit_bias", [token for token, _ in params.biases]), ("allowed_token_ids", allowed)):
            if ids and max(ids) >= self.vocab_size:
                raise RequestError(f"{name} holds token {max(ids)}, the ids are 0..{self.vocab_size - 1}", name)
        endings = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        if allowed and params.min_tokens and endings.issuperset(allowed):
            raise RequestError(
                f"each of allowed_token_ids ends the output, so it cannot have min_tokens {params.min_tokens}",
                "allowed_token_ids",
            )
        if params.use_beam_search and params.n + len(self.eos_token_ids) + len(params.stop_token_ids) > self.vocab_size:
            raise RequestError(f"a beam search of width {params.n} needs a larger vocabulary", "n")


def _key(request_id: str, index: int) -> str:
    return f"{request_id}#{index}"
