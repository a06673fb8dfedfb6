"""``/v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.answers import ChatAnswer, Usage
from qserve.runtime.server.conversation import converse
from qserve.runtime.server.openapi import described
from qserve.runtime.server.protocol import ChatRequest, parse
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", **described(ChatRequest, streams=True))
    async def chat_completions(request: Request) -> Response:
        service.admit(request)
        body = parse(ChatRequest, await service.body(request))
        service.check_model(body.model)
        try:
            messages = [message.for_template() for message in body.messages]
            options = body.chat_template_kwargs.given() if body.chat_template_kwargs else None
            conversation = await asyncio.to_thread(
                converse, service.encoder, service.dialect, messages, body.sampling_params(), body.tool_use(), options
            )
            params = conversation.params
            generation = await service.submit(request, [conversation.prompt], params, body.priority)
        except RequestError as error:
            raise RequestError(str(error), body.name_of(error.param)) from None
        answer = ChatAnswer(
            model=service.model_name,
            choices=params.n,
            usage=Usage(generation.prompt_tokens),
            texts=service.texts,
            logprobs=params.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            parser=conversation.parser,
        )
        return await service.answer(request, generation, answer, **body.delivery())

    return routes
