"""``/v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.preprocessing import preprocess
from qserve.runtime.server.openai.answers import ChatAnswer, Usage
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.protocol import ChatRequest, parse
from qserve.runtime.server.reply import Call, Reply
from qserve.runtime.server.service import Service


async def begin(service: Service, call: Call, content: dict[str, Any]) -> Reply:
    body = parse(ChatRequest, content)
    adapter = service.adapter(body.model)
    try:
        messages = [message.for_template() for message in body.messages]
        params, use, options = body.sampling_params(service.sampling_defaults), body.tool_use(), body.template_options()
        inputs = await asyncio.to_thread(
            preprocess, service.encoder, service.dialect, messages, params, use, options
        )
        params = inputs.params
        if body.limit is None:
            params = params.within(len(inputs.prompt), service.max_model_len)
        generation = await service.submit(call, [inputs.prompt], params, body.priority, adapter)
    except RequestError as error:
        raise RequestError(str(error), body.name_of(error.param)) from None
    answer = ChatAnswer(
        model=adapter or service.model_name,
        choices=params.n,
        usage=Usage(generation.prompt_tokens),
        texts=service.texts,
        logprobs=params.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        parser=inputs.parser,
    )
    return Reply(generation, answer, body.delivery())


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", **described(ChatRequest, streams=True))
    async def chat_completions(request: Request) -> Response:
        return await service.respond(request, begin)

    return routes
