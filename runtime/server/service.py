"""``Service``: what the routes share, and the path of every request to the engine and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cached_property, partial
from math import ceil
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from qserve.checkpoint.errors import UsageError
from qserve.runtime.backlog import QueueFullError
from qserve.runtime.client.engine_client import SHUTTING_DOWN, EngineClient
from qserve.runtime.client.generation import Generation
from qserve.runtime.client.host import EngineHost
from qserve.runtime.constraint import Constraint
from qserve.runtime.digests import adapter_salt, chain_digests
from qserve.runtime.grammar import Vocabulary
from qserve.runtime.pooling import stated_pooling
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.accounting import Account, Accounting
from qserve.runtime.server.chat.dialect import Dialect
from qserve.runtime.server.chat.prompts import PromptEncoder
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.body import MAX_COMMAS, MORE_COMMAS, read_json
from qserve.runtime.server.http.json_writer import JsonWriter
from qserve.runtime.server.http.streaming import EventStream, after_first, while_connected
from qserve.runtime.server.kv_exchange import KvExchange
from qserve.runtime.server.limits.answer_size import bounded
from qserve.runtime.server.limits.constraints import ConstraintChecker
from qserve.runtime.server.limits.keys import ApiKey, KeyRing
from qserve.runtime.server.limits.quota import QuotaError
from qserve.runtime.server.limits.shared_pool import SharedPool
from qserve.runtime.server.openai.logprobs import TokenTexts
from qserve.runtime.server.prefix_news import PrefixNews
from qserve.runtime.server.reply import Call, Reply
from qserve.runtime.server.telemetry.access_log import AccessLog
from qserve.runtime.server.telemetry.metrics import Metrics
from qserve.runtime.server.telemetry.tracing import Tracer, otlp_exporter

MAX_RETRY_AFTER = 120  # seconds; clients give up on longer ones


# Validates a body, submits what it asks for, and returns the reply.
Begin = Callable[["Service", Call, dict[str, Any]], Awaitable[Reply]]


class Service:
    """What the routes share: a client of the engine and everything made once per model."""

    def __init__(self, host: EngineHost, config: ServerConfig, keys: KeyRing | None = None) -> None:
        info, source, tokenizer = host.info, host.source, host.tokenizer
        self.config = config
        self.keys = KeyRing(config.api_keys, config.api_keys_file) if keys is None else keys
        self.model_name = config.model_name or info.model_name
        self.model_names = (self.model_name, *config.model_aliases)
        for adapter in info.adapters:
            self.check_adapter_name(adapter.name)
        self.max_model_len = info.max_model_len
        self.embedding_size = info.hidden_size
        self.pooling = stated_pooling(source)
        self.sampling_defaults = info.sampling_defaults
        self.max_waiting = info.max_waiting
        self.max_commas = most_commas(info.max_model_len, info.max_waiting_tokens)
        self.uploads = SharedPool(config.max_upload_bytes)
        self.source = source
        self.stored_bytes = source.stored_bytes()
        self.created = int(time.time())
        self.draining = False
        self.closing = asyncio.Event()  # set in the server's loop once it drains
        self.metrics = Metrics(
            self.model_name,
            source.card,
            vllm_alias=config.vllm_metrics,
            kernels=info.kernels,
            max_waiting=info.max_waiting,
        )
        self.accounting = Accounting(self.metrics)
        self.tracer = None if config.otlp_endpoint is None else Tracer(otlp_exporter(config.otlp_endpoint))
        self.engine = EngineClient(host, self.metrics, config.stream_interval)
        self.prefixes = PrefixNews(self.engine)
        self.kv = KvExchange(self.engine)
        self.constraints = ConstraintChecker(partial(Vocabulary.of, tokenizer, info.vocab_size, info.eos_token_ids))
        self.encoder = PromptEncoder(tokenizer, info.max_model_len, info.vocab_size)
        self.texts = TokenTexts(tokenizer)
        self.writer = JsonWriter()
        self.dialect = Dialect(tokenizer, config.tool_format, config.reasoning)

    @cached_property
    def access_log(self) -> AccessLog:
        return AccessLog(self.model_name, self.metrics, self.tracer, lambda: self.draining)

    @property
    def ready(self) -> bool:
        return self.engine.alive and not self.draining

    def close(self, timeout: float = 10.0) -> None:
        """End the engine, which gets ``timeout`` seconds for its step, and the process that tries constraints."""
        self.constraints.close()
        self.engine.stop(timeout)
        if self.tracer is not None:
            self.tracer.close()

    def model(self, name: str) -> dict[str, Any]:
        """The entry of the model in ``/v1/models`` under one of its names."""
        card, spec, transfer = self.source.card, self.source.spec, self.engine.info.kv_transfer
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qserve",
            "max_model_len": self.max_model_len,
            "qserve": {
                "quantized": spec is not None,
                "stored_bytes": self.stored_bytes,
                "sampling_defaults": self.sampling_defaults,
                "quality_card": None if card is None else card.to_json(),
                **({} if transfer is None else {"kv_transfer": transfer.identity}),
            },
        }

    def model_card(self, name: str) -> dict[str, Any]:
        """The entry in ``/v1/models`` of the model or an adapter."""
        if (adapter := self.engine.adapters.get(name)) is None:
            return self.model(name)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qserve",
            "parent": self.model_name,
            "max_model_len": self.max_model_len,
            "qserve": {"lora_sha256": adapter.sha256, "sampling_defaults": self.sampling_defaults},
        }

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request asks for as its ``model``; None for the model itself. Raises ``APIError`` 404."""
        if name is None or name in self.model_names:
            return None
        if name in self.engine.adapters:
            return name
        served = [*self.model_names, *self.engine.adapters]
        shown = " or ".join(map(repr, served[:10])) + (f", and {len(served) - 10} more" if len(served) > 10 else "")
        raise APIError(
            404, f"model {name!r:.200} is not served here; it is {shown}", param="model", code="model_not_found"
        )

    def check_model(self, name: str | None) -> None:
        """For a route that only the model itself answers. Raises ``APIError``."""
        if self.adapter(name) is not None:
            raise APIError(400, f"adapters as {name!r:.200} only generate text; ask {self.model_name!r}", param="model")

    def check_adapter_name(self, name: str) -> None:
        """Raises ``UsageError`` where requests call the model itself so."""
        if name in self.model_names:
            raise UsageError(f"{name!r:.200} is the name of the model itself; give the adapter another")

    async def body(self, request: Request) -> dict[str, Any]:
        config = self.config
        return await read_json(
            request,
            self.uploads,
            max_bytes=config.max_body_bytes,
            max_commas=self.max_commas,
            timeout=config.body_timeout,
        )

    async def submit(
        self,
        call: Call,
        prompts: list[list[int]],
        params: SamplingParams,
        priority: int | None,
        adapter: str | None = None,
    ) -> Generation:
        self._require_ready()
        if call.kv is not None and call.kv.prefill:  # one token says that the prompt is computed
            params = replace(params, n=1, max_tokens=1, min_tokens=0)
        choices = len(prompts) * params.n
        if choices > self.max_waiting:
            raise RequestError(
                f"{len(prompts)} prompts with n {params.n} are more than the {self.max_waiting} that may wait here", "n"
            )
        tokens, most = sum(map(len, prompts)), self.engine.info.max_waiting_tokens
        if len(prompts) > 1 and tokens > most:
            raise RequestError(
                f"{len(prompts)} prompts with {tokens} tokens together are more than the {most} that may wait here; "
                "send fewer at once, or raise --max-waiting-tokens",
                "prompt",
            )
        key = call.key
        if key and key.max_requests is not None and choices > key.max_requests:
            raise RequestError(
                f"{len(prompts)} prompts with n {params.n} are more than the {key.max_requests} requests that this API "
                "key may have at once",
                "n",
            )
        priority = _priority(key, priority)
        params = bounded(params, prompts, self.max_model_len)
        if call.kv is not None and call.kv.source:
            size = self.engine.info.block_size
            digests = [each.hex() for each in chain_digests(prompts[0][:-1], size, salt=self._salt(call, adapter))]
            await self.kv.fetch(call.kv, digests[self.prefixes.num_held(digests) :])
        try:
            # A prompt that is computed for another replica is paid for there.
            payer = None if call.kv is not None and call.kv.prefill else key
            account = self.accounting.open(payer, choices, self._backlog_seconds())
            grammar = None
            if params.constraint is not None:
                grammar = await self._tried(params.constraint, call.tenant, account, choices)
            generation = await self.engine.submit(
                prompts,
                params,
                grammar=grammar,
                priority=priority,
                cache_salt=call.tenant,
                tenant=call.tenant,
                weight=key.weight if key else 1.0,
                adapter=adapter,
                observer=account,
            )
        except QueueFullError as error:
            raise self._busy(str(error)) from None
        except QuotaError as error:
            raise _limited(error) from None
        if payer is not None:  # a refused request costs nothing
            self.accounting.quotas.spend(payer, generation.prompt_tokens, time.monotonic())
        call.record.generations.append(generation)
        call.record.prompt = prompts[0]
        call.record.adapter = adapter
        return generation

    def _note_prompt(self, call: Call, body: dict[str, Any]) -> None:
        """Tell those that watch the prefixes which blocks stand for this prompt."""
        if self.prefixes.is_watched and call.record.prompt:
            salt = self._salt(call, call.record.adapter)
            self.prefixes.note(body, call.asked_for, call.record.prompt, salt)

    def _salt(self, call: Call, name: str | None) -> str:
        """Of the prompt's blocks in the engine."""
        adapter = self.engine.adapters.get(name or "")
        return call.tenant if adapter is None else adapter_salt(adapter.sha256, call.tenant)

    async def _tried(self, constraint: Constraint, tenant: str, account: Account, choices: int) -> str:
        """The constraint in llguidance's format. A request whose constraint is refused leaves its ``account``."""
        try:
            return await self.constraints.grammar(constraint, tenant)
        except BaseException:  # its client may leave meanwhile
            account.refused(choices)
            raise

    async def pool(
        self, request: Request, prompts: list[list[int]], params: SamplingParams, priority: int | None
    ) -> tuple[list[list[float]], int]:
        """What ``params.pooling`` makes of each prompt, and the tokens of all. If the client leaves, it is aborted."""
        generation = await self.submit(call_of(request), prompts, params, priority)

        async def vectors() -> list[list[float]]:
            found = {index: output.embedding or [] async for index, output in generation}
            return [found[index] for index in sorted(found)]

        try:
            return await while_connected(request, vectors()), generation.prompt_tokens
        finally:
            self.engine.abort(generation)

    def admit(self, call: Call) -> None:
        """Refuse a caller that could not have even one more request, before a body is read.

        How many choices and tokens a request asks for is checked later, by the quotas of its key and by the scheduler.
        Raises ``APIError`` 503 for a limit of the whole server and 429 for one of the key.
        """
        self._require_ready()
        try:
            self.engine.require_room(call.tenant)
            if call.key is not None:
                self.accounting.quotas.check(call.key, 1, time.monotonic(), self._backlog_seconds())
        except QueueFullError as error:
            raise self._busy(str(error)) from None
        except QuotaError as error:
            raise _limited(error) from None

    def _require_ready(self) -> None:
        if not self.ready:
            reason = "the engine has failed" if self.engine.failure else SHUTTING_DOWN
            raise APIError(503, reason, headers={"Retry-After": "5"})

    def _backlog_seconds(self) -> float:
        """Seconds until the waiting requests are done, at the rate of the last minute."""
        stats = self.engine.stats
        return self.accounting.rate.backlog_seconds(stats.num_waiting, stats.waiting_tokens, time.monotonic())

    def _busy(self, message: str) -> APIError:
        return APIError(503, message, code="queue_full", headers=_retry_after(self._backlog_seconds()))

    async def respond(self, request: Request, begin: Begin) -> Response:
        """The answer of a route. The body begins a reply, and its first token is awaited before the status is sent.

        If the client leaves, its generation is aborted.
        """
        call = call_of(request)
        self.admit(call)
        body = await self.body(request)
        reply = await begin(self, call, body)
        self._note_prompt(call, body)
        streaming = False
        try:
            if call.kv is not None and call.kv.prefill:
                return await while_connected(request, self._prefilled(reply))
            if not reply.streamed:
                whole = await self.writer.response(await while_connected(request, reply.whole()))
                whole.headers.update(call.record.cache_headers)
                return whole
            response = EventStream(
                await while_connected(request, after_first(reply.chunks())),
                lambda: self.engine.abort(reply.generation),
                named=reply.answer.named_events,
                path=request.url.path,
            )
            response.headers.update(call.record.cache_headers)
            streaming = True
            return response
        finally:
            if not streaming:
                self.engine.abort(reply.generation)

    async def _prefilled(self, reply: Reply) -> Response:
        """The answer to a router that wants a prompt computed for another replica."""
        async for _ in reply.generation:
            pass
        return JSONResponse({"object": "prefill", "prompt_tokens": reply.generation.prompt_tokens})


def most_commas(max_model_len: int, max_waiting_tokens: int) -> int:
    """Commas that a body may hold: as many tokens as may ever wait, where to parse them stops no stream for long."""
    return MORE_COMMAS + max(max_model_len, min(MAX_COMMAS, 2 * max_waiting_tokens))


def call_of(request: Request) -> Call:
    return Call(request.scope["qserve.key"], request.scope["qserve.record"], request.scope.get("qserve.kv"))


def _limited(error: QuotaError) -> APIError:
    return APIError(429, str(error), code="rate_limit_exceeded", headers=_retry_after(error.retry_after))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, min(MAX_RETRY_AFTER, ceil(seconds))))}


def _priority(key: ApiKey | None, asked: int | None) -> int:
    """Raises ``APIError`` 403 where a request asks for a better priority than its key may have: 0 where its key has no
    limit, for it would go before its neighbours. Without keys a caller orders what is all its own."""
    if key is None:
        return asked or 0
    best = key.priority or 0
    if asked is None:
        return max(best, 0)
    if asked >= best:
        return asked
    raise APIError(
        403,
        f"this API key may ask for priorities of {best} or more (lower runs first), not {asked}",
        param="priority",
        code="priority_not_allowed",
    )
