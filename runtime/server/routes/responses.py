"""``/v1/responses``: the next items of a conversation that the client keeps."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.chat.preprocessing import preprocess
from qserve.runtime.server.openai.answers import Usage
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.openai.responses_answer import ResponseAnswer
from qserve.runtime.server.openai.responses_request import ResponseRequest
from qserve.runtime.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", **described(ResponseRequest, streams=True))
    async def responses(request: Request) -> Response:
        service.admit(request)
        body = parse(ResponseRequest, await service.body(request))
        service.check_model(body.model)
        messages = body.messages()
        try:
            inputs = await asyncio.to_thread(
                preprocess, service.encoder, service.dialect, messages, body.sampling_params(), body.tool_use()
            )
            generation = await service.submit(request, [inputs.prompt], inputs.params, None)
        except RequestError as error:
            raise RequestError(str(error), body.name_of(error.param)) from None
        answer = ResponseAnswer(
            service.model_name,
            body.shown(),
            Usage(generation.prompt_tokens),
            inputs.parser() if inputs.parser else None,
        )
        return await service.answer(request, generation, answer, stream=bool(body.stream), include_usage=True)

    return routes
