"""``create_app``: the routes of the OpenAI-compatible server.

Knows routes and which part does what; does not know sockets, processes or how tokens are computed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.scheduler import QueueFullError
from qserve.runtime.server.answers import Answer, ChatAnswer, CompletionAnswer, Echo, Usage
from qserve.runtime.server.body import read_json
from qserve.runtime.server.engine_thread import EngineFailure, EngineThread, Generation
from qserve.runtime.server.errors import APIError, ClientGone
from qserve.runtime.server.guard import Guard
from qserve.runtime.server.logprobs import TokenTexts
from qserve.runtime.server.metrics import Metrics
from qserve.runtime.server.prompts import PromptEncoder
from qserve.runtime.server.protocol import ChatRequest, CompletionRequest, parse
from qserve.runtime.server.streaming import EventStream, after_first, while_connected

if TYPE_CHECKING:
    from qserve.runtime.engine import Engine


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves.

    Attributes:
        api_keys: callers must show one of these; none means everybody may call.
        model_name: what the model is called in requests and answers; None takes the engine's name.
        drain_timeout: seconds that running requests may still take after a first SIGTERM.
        max_body_bytes: larger request bodies are refused.
        body_timeout: seconds in which a request body must have arrived.
        vllm_metrics: ``/metrics`` repeats everything under vLLM's prefix.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    model_name: str | None = None
    drain_timeout: float = 30.0
    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0
    vllm_metrics: bool = False


class Service:
    """What the routes share: the engine's thread and everything made once per model."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.config = config
        self.model_name = config.model_name or engine.model_name
        self.max_model_len = engine.max_model_len
        self.max_waiting = engine.config.max_waiting
        self.source = engine.source
        self.stored_bytes = engine.source.stored_bytes()
        self.created = int(time.time())
        self.draining = False
        self.metrics = Metrics(self.model_name, engine.source.card, vllm_alias=config.vllm_metrics)
        self.thread = EngineThread(engine, self.metrics)
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


def create_app(service: Service) -> FastAPI:
    """The ASGI application. The caller starts and stops ``service.thread``."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_keys=service.config.api_keys)
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        alive = service.thread.alive
        return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        state = "ready" if service.ready else "draining" if service.draining else "failed"
        return JSONResponse({"status": state}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        content = service.metrics.render(service.thread.stats)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.model())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await service.body(request))
        service.check_model(body.model)
        params = body.sampling_params()
        encoder = service.encoder
        prompts = await asyncio.to_thread(lambda: [encoder.encode(prompt) for prompt in body.prompt])
        if body.max_tokens is None:  # the default, not the caller, gives way to a prompt that leaves less room
            room = max(1, service.max_model_len - max(map(len, prompts)))
            params = replace(params, max_tokens=min(params.max_tokens or room, room))
        echo = None
        if body.echo:
            texts = await asyncio.to_thread(
                lambda: [prompt if isinstance(prompt, str) else encoder.decode(prompt) for prompt in body.prompt]
            )
            firsts = [ids[0] if params.prompt_logprobs else None for ids in prompts]
            echo = [Echo(text, first) for text, first in zip(texts, firsts) for _ in range(params.n)]
        generation = await service.submit(request, prompts, params, body.priority)
        answer = CompletionAnswer(
            service.model_name,
            params.n * len(prompts),
            Usage(generation.prompt_tokens),
            service.texts,
            logprobs=params.logprobs is not None,
            echo=echo,
        )
        return await service.answer(
            request, generation, answer, stream=bool(body.stream), include_usage=body.include_usage
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse(ChatRequest, await service.body(request))
        service.check_model(body.model)
        try:
            params = body.sampling_params()
            messages = [message.for_template() for message in body.messages]
            prompt = await asyncio.to_thread(service.encoder.chat, messages)
            generation = await service.submit(request, [prompt], params, body.priority)
        except RequestError as error:
            raise RequestError(str(error), body.name_of(error.param)) from None
        answer = ChatAnswer(
            service.model_name,
            params.n,
            Usage(generation.prompt_tokens),
            service.texts,
            logprobs=params.logprobs is not None,
        )
        return await service.answer(
            request, generation, answer, stream=bool(body.stream), include_usage=body.include_usage
        )

    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return APIError(400, str(error), param=error.param, code="invalid_value").response()

    @app.exception_handler(EngineFailure)
    async def engine_failure(_: Request, error: EngineFailure) -> Response:
        return APIError(500, str(error)).response()

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path[:200]}"
        message = {404: f"there is no route {what}", 405: f"the method is not allowed: {what}"}
        status = error.status_code
        headers = dict(error.headers or {})
        return APIError(status, message.get(status, str(error.detail)), headers=headers).response()

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return APIError(500, "the server failed on this request; its log says why").response()
