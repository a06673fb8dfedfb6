"""``/tokenize`` and ``/detokenize``: from text to token ids and back, in the shapes of vLLM."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.openai.messages import Message
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.protocol import MAX_MESSAGES, TemplateFields, parse
from qserve.runtime.server.openai.strict import NotDone, Strict
from qserve.runtime.server.service import Service, call_of


class TokenizeRequest(TemplateFields):
    """``prompt``, or ``messages`` as the chat template writes them."""

    not_done: ClassVar[NotDone] = {
        **TemplateFields.not_done,
        "mm_processor_kwargs": ({},),
        "tools": ([],),
    }

    model: str | None = None
    prompt: str | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    def encode(body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if body.prompt is not None:
            return service.encoder.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        if body.add_special_tokens:
            raise RequestError("the chat template puts special tokens where they belong", "add_special_tokens")
        messages = [message.for_template() for message in body.messages or ()]
        return service.encoder.chat(messages, options=body.template_options())

    @routes.post("/tokenize", **described(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        service.admit(call_of(request))
        body = parse(TokenizeRequest, await service.body(request))
        service.adapter(body.model)
        tokens = await asyncio.to_thread(encode, body)
        pieces = await asyncio.to_thread(service.encoder.pieces, tokens) if body.return_token_strs else None
        return await service.writer.response({
            "count": len(tokens),
            "max_model_len": service.max_model_len,
            "tokens": iter(tokens),
            "token_strs": None if pieces is None else iter(pieces),
        })

    @routes.post("/detokenize", **described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        service.admit(call_of(request))
        body = parse(DetokenizeRequest, await service.body(request))
        service.adapter(body.model)
        tokens = body.tokens
        if tokens and min(tokens) < 0:
            raise RequestError(f"tokens holds the negative token id {min(tokens)}", "tokens")
        try:  # ids have the bounds of a prompt
            if tokens:
                service.encoder.encode(tokens)
        except RequestError as error:
            raise RequestError(str(error), "tokens") from None
        text = await asyncio.to_thread(service.encoder.decode, tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    return routes
