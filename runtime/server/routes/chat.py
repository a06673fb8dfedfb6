"""``/v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.answers import ChatAnswer, Usage
from qserve.runtime.server.protocol import ChatRequest, parse
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
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
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        return await service.answer(
            request, generation, answer, stream=bool(body.stream), include_usage=body.include_usage
        )

    return routes
