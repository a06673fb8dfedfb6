"""``Choice``: one answer while it grows, from the tokens that a step chose for it.

Tokens become text. A stop string or a grammar may end it. The rows of its prompt become log-probabilities or a vector.
The scheduler is not told here that a choice has ended: the caller reads it in the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from qserve.runtime.beam import Beam, BeamSearch
from qserve.runtime.detokenizer import Detokenizer, new_detokenizer
from qserve.runtime.grammar_state import GrammarState
from qserve.runtime.output import RequestOutput
from qserve.runtime.pooling import Pool
from qserve.runtime.request import Request
from qserve.runtime.sampler import Sampled, TokenLogprobs, prompt_logprobs
from qserve.runtime.step_plan import RequestUpdate
from qserve.runtime.stop_checker import StopChecker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RowSink = Callable[[int, Tensor], None]
"""Takes a position of the prompt and float32 [n, width], the rows of that position and the next n - 1. They are valid
during the call only."""


class Choice:
    """One of the n sequences of a request. A beam search has one choice for each of its live beams; they share
    ``search``, and the answers come when it is over.

    Attributes:
        sequence: the scheduler's request; only read here.
        seed: int64 that its draws come from.
        grammar: where its output stands in its constraint.
        deadline: seconds on the engine's clock after which it is late; infinite without a timeout.
        row_sink: gets the requested rows of the prompt, instead of the output.
        num_tokens: output tokens so far. If its text ended in the middle of a run, the sequence may have more.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        sequence: Request,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        grammar: GrammarState | None = None,
        head: Tensor | None = None,
    ) -> None:
        params = sequence.params
        self.request_id = request_id
        self.index = index
        self.sequence = sequence
        self.seed = seed
        self.grammar = grammar
        self.deadline = math.inf if params.timeout is None else sequence.arrival_time + params.timeout
        self.row_sink: RowSink | None = None
        self.search: BeamSearch | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._detokenizer = self._new_detokenizer()
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output)
        self._pool = None if params.pooling is None else Pool(params.pooling, head)
        self._prompt_logprobs: list[TokenLogprobs] = []

    def begin_search(self) -> None:
        """Begin with the first beam of a search. Call it when the scheduler has settled how long an output may be."""
        sequence = self.sequence
        self.search = BeamSearch(
            sequence.params, sequence.endings, sequence.max_output_tokens, {sequence.request_id: Beam()}
        )

    def fork(self, sequence: Request) -> Choice:
        """Another beam of the same search."""
        beam = copy(self)
        beam.sequence = sequence
        return beam

    def take_rows(self, start: int, rows: Tensor) -> None:
        """Take rows of the model for ``start`` and the positions after it, as the runner delivers them. Rows past the
        prompt are ignored."""
        prompt, count = self.sequence.prompt_token_ids, self.sequence.params.prompt_logprobs
        rows = rows[: len(prompt) - start]
        if self.row_sink is not None:
            self.row_sink(start, rows)
        elif self._pool is not None:
            self._pool.add(rows)
        elif count is not None:
            following = prompt[start + 1 : start + 1 + len(rows)]
            self._prompt_logprobs += prompt_logprobs(rows, following, count)

    def advance(self, update: RequestUpdate, run: Sequence[Sampled]) -> RequestOutput:
        """Turn new tokens into text. The output has a ``finish_reason`` where the last token, a stop string in the text
        or the end of its grammar ended the choice; the tokens of the run after that are dropped."""
        text, tokens = "", update.token_ids
        reason, stop_reason, count = None, None, 0
        while reason is None and count < len(tokens):
            token, count = tokens[count], count + 1
            if count == len(tokens):
                reason, stop_reason = update.finish_reason, update.stop_reason
            more, reason = self._spell(token, reason)
            text += more
            if self._stops.matched is not None:
                reason, stop_reason = "stop", self._stops.matched
        if reason is not None:
            text += self._stops.flush()
        logprobs = [each.logprobs for each in run[:count] if each.logprobs is not None]
        return self._output(text, list(tokens[:count]), logprobs or None, reason, stop_reason)

    def _spell(self, token: int, reason: str | None) -> tuple[str, str | None]:
        """The text that a token adds, and the ``reason`` why the choice ends with it, or None."""
        self.num_tokens += 1
        # A token that ended the request is part of the answer's text only if asked for.
        shown = [token] if reason != "stop" or self.sequence.params.include_stop_str_in_output else []
        if self.grammar is not None and reason != "stop":
            self.grammar.consume(token)
            if self.grammar.is_complete:  # even by an ending that the request itself would ignore
                reason = "stop"
                shown = [] if token in self.sequence.eos_token_ids else shown
        text = self._detokenizer.append(shown)
        # Stop strings are looked for from the first token after ``min_tokens`` on.
        if self.num_tokens > self.sequence.params.min_tokens:
            text = self._stops.append(text)
        if reason is not None:
            text += self._stops.append(self._detokenizer.flush())
        return text, reason

    def embed(self) -> RequestOutput:
        """The only output of a request for an embedding, when its prompt is computed."""
        assert self._pool is not None, "no embedding was asked for"
        try:
            return replace(self._output(finish_reason="stop"), embedding=self._pool.vector())
        except ValueError as error:
            return self._output(finish_reason="error", error=str(error))

    def found(self) -> list[RequestOutput]:
        """The outputs of a finished beam search, each of them whole, the best first."""
        assert self.search is not None, "no beam search was asked for"
        params, outputs = self.sequence.params, []
        for index, beam in enumerate(self.search.finished):
            tokens, end = list(beam.token_ids), beam.stop_token
            detokenizer = self._new_detokenizer()
            text = detokenizer.append(tokens if end is None else tokens[:-1]) + detokenizer.flush()
            logprobs = None if params.logprobs is None else list(beam.logprobs)
            shown = end if params.ignore_eos or end not in self.sequence.eos_token_ids else None
            output = self._output(text, tokens, logprobs, "length" if end is None else "stop", shown)
            cached = output.prompt_tokens if index else output.cached_tokens  # the prompt was computed once
            outputs.append(replace(output, index=index, output_tokens=len(tokens), cached_tokens=cached))
        return outputs

    def impasse(self) -> tuple[str, str | None]:
        """Why no token could be chosen, and the field of the request that is at fault, or None."""
        if self.grammar is not None and self.grammar.error is not None:
            return f"the output cannot go on within its constraint: {self.grammar.error}", self.grammar.param
        if self.sequence.params.allowed_token_ids is not None or self.sequence.bad_words:
            field = "bad_words" if self.sequence.bad_words else "allowed_token_ids"
            return f"the output cannot go on: {field} leaves no token, or the model computed NaN", field
        return "the model computed NaN for this request", None

    def fail(self, reason: str, error: str, param: str | None = None) -> list[RequestOutput]:
        """End without a further token; a beam search ends all of its answers."""
        output = self._output(finish_reason=reason, error=error, error_param=param)
        return [replace(output, index=i) for i in range(self.search.params.n)] if self.search else [output]

    def _new_detokenizer(self) -> Detokenizer:
        sequence = self.sequence
        params = sequence.params
        return new_detokenizer(
            self._tokenizer, sequence.prompt_token_ids, params.skip_special_tokens, visible=params.visible_tokens
        )

    def _output(
        self,
        text: str = "",
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
        error_param: str | None = None,
    ) -> RequestOutput:
        sequence = self.sequence
        scored, self._prompt_logprobs = self._prompt_logprobs, []
        return RequestOutput(
            request_id=self.request_id,
            index=self.index,
            text=text,
            token_ids=token_ids or [],
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached,
            output_tokens=len(sequence.output_token_ids) if self.search else self.num_tokens,
            queue_seconds=(sequence.scheduled_time or sequence.arrival_time) - sequence.arrival_time,
            error=error,
            prompt_logprobs=scored or None,
            error_param=error_param,
        )
