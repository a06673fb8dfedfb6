"""``/v1/messages``: the next message of a conversation in Anthropic's shape, and how many tokens its prompt has."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.anthropic.message_answer import MessageAnswer
from qserve.runtime.server.anthropic.messages_request import CountTokensRequest, MessageRequest
from qserve.runtime.server.chat.preprocessing import ChatInputs, preprocess
from qserve.runtime.server.openai.answers import Usage
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.reply import Call, Reply
from qserve.runtime.server.service import Service, call_of


async def _inputs(service: Service, body: CountTokensRequest) -> ChatInputs:
    return await asyncio.to_thread(
        preprocess,
        service.encoder,
        service.dialect,
        body.template_messages(),
        body.sampling_params(service.sampling_defaults),
        body.tool_use(),
        body.template_options(service.dialect.reasoning, service.encoder.variables),
    )


async def begin(service: Service, call: Call, content: dict[str, Any]) -> Reply:
    body = parse(MessageRequest, content)
    adapter = service.adapter(body.model)
    try:
        inputs = await _inputs(service, body)
        generation = await service.submit(call, [inputs.prompt], inputs.params, None, adapter)
    except RequestError as error:
        raise RequestError(str(error), body.name_of(error.param)) from None
    parser = inputs.parser() if inputs.parser else None
    answer = MessageAnswer(adapter or service.model_name, Usage(generation.prompt_tokens), parser)
    return Reply(generation, answer, body.delivery())


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", **described(MessageRequest, streams=True))
    async def messages(request: Request) -> Response:
        return await service.respond(request, begin)

    @routes.post("/v1/messages/count_tokens", **described(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        service.admit(call_of(request))
        body = parse(CountTokensRequest, await service.body(request))
        service.adapter(body.model)
        try:
            inputs = await _inputs(service, body)
        except RequestError as error:
            raise RequestError(str(error), body.name_of(error.param)) from None
        return JSONResponse({"input_tokens": len(inputs.prompt)})

    return routes
