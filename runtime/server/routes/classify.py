"""``/classify``: the probability of each class of a sequence classifier, in the shape of vLLM."""

from __future__ import annotations

import asyncio
import secrets
import time

from fastapi import APIRouter, Request, Response

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.pooling_request import ClassifyRequest
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.service import Service, call_of


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/classify", **described(ClassifyRequest))
    @routes.post("/v1/classify", **described(ClassifyRequest))
    async def classify(request: Request) -> Response:
        service.admit(call_of(request))
        body = parse(ClassifyRequest, await service.body(request))
        service.check_model(body.model)
        classes = service.engine.info.classes
        if classes is None:
            raise RequestError("this model has no classification head, so it classifies nothing", "model")
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling="classify", timeout=body.timeout)
        encoder = service.encoder
        try:
            prompts = await asyncio.to_thread(lambda: [encoder.encode(prompt) for prompt in body.input])
            logits, tokens = await service.pool(request, prompts, params, body.priority)
        except RequestError as error:
            param = "input" if error.param in ("prompt", "n") else error.param
            raise RequestError(str(error), param) from None
        data = (
            {
                "index": index,
                "label": classes.labels[max(range(len(each)), key=lambda number: each[number])],
                "probs": classes.probabilities(each) if body.activates else each,
                "num_classes": len(each),
            }
            for index, each in enumerate(logits)
        )
        return await service.writer.response(
            {
                "id": f"classify-{secrets.token_hex(16)}",
                "object": "list",
                "created": int(time.time()),
                "model": service.model_name,
                "data": data,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
            }
        )

    return routes
