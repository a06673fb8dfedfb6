"""``Service``: what the routes share, and the way of every request to the engine and back.

Knows the engine's thread and what is made once per model; does not know routes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.scheduler import QueueFullError
from qserve.runtime.server.answers import Answer
from qserve.runtime.server.body import read_json
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.engine_thread import EngineThread, Generation
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.logprobs import TokenTexts
from qserve.runtime.server.metrics import Metrics
from qserve.runtime.server.prompts import PromptEncoder
from qserve.runtime.server.streaming import EventStream, after_first, while_connected

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine


class Service:
    """What the routes share: the engine's thread and everything made once per model."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config = config
        self.model_name = config.model_name or engine.model_name
        self.max_model_len = engine.max_model_len
        self.embedding_size = engine.model_config.hidden_size
        self.max_waiting = engine.config.max_waiting
        self.source = engine.source
        self.stored_bytes = engine.source.stored_bytes()
        self.created = int(time.time())
        self.draining = False
        self.metrics = Metrics(self.model_name, engine.source.card, vllm_alias=config.vllm_metrics)
        self.thread = EngineThread(engine, self.metrics, config.stream_interval)
        self.encoder = PromptEncoder(engine.tokenizer, engine.max_model_len, engine.vocab_size)
        self.texts = TokenTexts(engine.tokenizer)

    @property
    def ready(self) -> bool:
        return self.thread.alive and not self.draining

    def model(self) -> dict[str, Any]:
        """The model's entry in ``/v1/models``."""
        card, spec = self.source.card, self.source.spec
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "qserve",
            "max_model_len": self.max_model_len,
            "qserve": {
                "quantized": spec is not None,
                "stored_bytes": self.stored_bytes,
                "quality_card": None if card is None else card.to_json(),
            },
        }

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise APIError(
                404,
                f"model {name!r:.200} is not served here; it is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def body(self, request: Request) -> dict[str, Any]:
        config = self.config
        return await read_json(request, max_bytes=config.max_body_bytes, timeout=config.body_timeout)

    async def submit(
        self, request: Request, prompts: list[list[int]], params: SamplingParams, priority: int | None
    ) -> Generation:
        if not self.ready:
            raise APIError(503, "the server is shutting down", headers={"Retry-After": "5"})
        if len(prompts) * params.n > self.max_waiting:
            raise RequestError(
                f"{len(prompts)} prompts with n {params.n} are more than the {self.max_waiting} that may wait here", "n"
            )
        try:
            return await self.thread.submit(
                prompts, params, priority=priority or 0, cache_salt=request.scope["qserve.tenant"]
            )
        except QueueFullError as error:
            wait = str(self.thread.retry_after())
            raise APIError(503, str(error), code="queue_full", headers={"Retry-After": wait}) from None

    async def answer(
        self, request: Request, generation: Generation, answer: Answer, *, stream: bool, include_usage: bool
    ) -> Response:
        """The response, once its first token is there. A client that leaves takes its generation with it."""
        streaming = False
        try:
            if not stream:
                return JSONResponse(await while_connected(request, answer.whole(aiter(generation))))
            chunks = answer.chunks(aiter(generation), include_usage=include_usage)
            response = EventStream(
                await while_connected(request, after_first(chunks)), lambda: self.thread.abort(generation)
            )
            streaming = True
            return response
        finally:
            if not streaming:
                self.thread.abort(generation)
