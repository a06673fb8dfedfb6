"""``/v1/embeddings``: texts as vectors, the pooled hidden states of the model that is served.

They are computed like prompts, together with everything else that runs, and never read from the prefix cache.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema, field_validator

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.openai.openapi import PROMPT, described
from qserve.runtime.server.openai.protocol import parse, prompt_list
from qserve.runtime.server.openai.strict import Strict
from qserve.runtime.server.service import Service, call_of


class EmbeddingRequest(Strict):
    """``input`` becomes a list: of texts, or of lists of token ids."""

    model: str | None = None
    input: Annotated[Any, WithJsonSchema({"anyOf": PROMPT})]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Literal["mean", "last"] | None = None
    priority: int | None = None
    timeout: float | None = None
    user: str | None = None

    _inputs = field_validator("input")(prompt_list)


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/embeddings", **described(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        service.admit(call_of(request))
        body = parse(EmbeddingRequest, await service.body(request))
        service.check_model(body.model)
        if body.dimensions is not None and body.dimensions > service.embedding_size:
            raise RequestError(
                f"dimensions must be at most {service.embedding_size}, what the model has", "dimensions"
            )
        pooling = body.pooling or service.pooling or "mean"
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, timeout=body.timeout)
        encoder = service.encoder
        try:
            prompts = await asyncio.to_thread(lambda: [encoder.encode(prompt) for prompt in body.input])
            vectors, tokens = await service.pool(request, prompts, params, body.priority)
        except RequestError as error:
            param = "input" if error.param in ("prompt", "n") else error.param
            raise RequestError(str(error), param) from None
        shaped = (_shape(vector, body.dimensions, body.encoding_format == "base64") for vector in vectors)
        data = ({"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shaped))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": service.model_name, "usage": usage}
        return await service.writer.response(answer)

    return routes


def _shape(vector: list[float], dimensions: int | None, as_base64: bool) -> list[float] | str:
    """The first ``dimensions`` elements, of length 1 again; as base64 they are little-endian float32."""
    if dimensions is not None:
        length = math.hypot(*vector[:dimensions]) or 1.0
        vector = [value / length for value in vector[:dimensions]]
    if not as_base64:
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
