"""``/v1/responses``: the next items of a conversation that the client keeps."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.preprocessing import preprocess
from qserve.runtime.server.openai.answers import Usage
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.openai.responses_answer import ResponseAnswer
from qserve.runtime.server.openai.responses_request import ResponseRequest
from qserve.runtime.server.reply import Call, Reply
from qserve.runtime.server.service import Service


async def begin(service: Service, call: Call, content: dict[str, Any]) -> Reply:
    body = parse(ResponseRequest, content)
    adapter = service.adapter(body.model)
    messages = body.messages()
    try:
        asked, use = body.sampling_params(service.sampling_defaults), body.tool_use()
        inputs = await asyncio.to_thread(preprocess, service.encoder, service.dialect, messages, asked, use)
        params = inputs.params
        if body.max_output_tokens is None:
            params = params.within(len(inputs.prompt), service.max_model_len)
        generation = await service.submit(call, [inputs.prompt], params, None, adapter)
    except RequestError as error:
        raise RequestError(str(error), body.name_of(error.param)) from None
    answer = ResponseAnswer(
        adapter or service.model_name,
        body.shown(params),
        Usage(generation.prompt_tokens),
        inputs.parser() if inputs.parser else None,
    )
    return Reply(generation, answer, body.delivery())


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", **described(ResponseRequest, streams=True))
    async def responses(request: Request) -> Response:
        return await service.respond(request, begin)

    return routes
