"""``/rerank`` and ``/score``: how well documents fit a query, in the shapes of Jina, Cohere and vLLM.

Like embeddings they are computed like prompts, together with everything else that runs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qserve.runtime.sampling import RequestError
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.pooling_request import RerankRequest, ScoreOptions, ScoreRequest
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.scoring import score_pairs
from qserve.runtime.server.service import Service, call_of


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    async def scores(
        request: Request, pairs: Sequence[tuple[str, str]], options: ScoreOptions, field: str
    ) -> tuple[list[float], int]:
        try:
            return await score_pairs(service, request, pairs, options)
        except RequestError as error:
            raise RequestError(str(error), field if error.param in ("prompt", "n") else error.param) from None

    @routes.post("/rerank", **described(RerankRequest))
    @routes.post("/v1/rerank", **described(RerankRequest))
    @routes.post("/v2/rerank", **described(RerankRequest))
    async def rerank(request: Request) -> Response:
        service.admit(call_of(request))
        body = parse(RerankRequest, await service.body(request))
        service.check_model(body.model)
        found, tokens = await scores(request, [(body.query, text) for text in body.documents], body, "documents")
        results = [
            {"index": index, "relevance_score": found[index]}
            | ({} if body.return_documents is False else {"document": {"text": body.documents[index]}})
            for index in sorted(range(len(found)), key=lambda index: -found[index])[: body.top_n or None]
        ]
        return JSONResponse(
            {
                "id": f"rerank-{secrets.token_hex(16)}",
                "model": service.model_name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "results": results,
            }
        )

    @routes.post("/score", **described(ScoreRequest))
    @routes.post("/v1/score", **described(ScoreRequest))
    async def score(request: Request) -> Response:
        service.admit(call_of(request))
        body = parse(ScoreRequest, await service.body(request))
        service.check_model(body.model)
        found, tokens = await scores(request, body.pairs(), body, "text_2")
        return JSONResponse(
            {
                "id": f"score-{secrets.token_hex(16)}",
                "object": "list",
                "created": int(time.time()),
                "model": service.model_name,
                "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(found)],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
            }
        )

    return routes
