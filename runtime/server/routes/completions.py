"""``/v1/completions``: the continuation of a prompt."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from qserve.runtime.server.openai.answers import CompletionAnswer, Echo, Usage
from qserve.runtime.server.openai.best_of import BestOfAnswer
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.protocol import CompletionRequest, parse
from qserve.runtime.server.reply import Call, Reply
from qserve.runtime.server.service import Service


async def begin(service: Service, call: Call, content: dict[str, Any]) -> Reply:
    body = parse(CompletionRequest, content)
    adapter = service.adapter(body.model)
    params, choices = body.sampling_params(service.sampling_defaults), body.n or 1
    encoder, kept = service.encoder, params.num_prompt_kept(service.max_model_len)
    prompts = await asyncio.to_thread(lambda: [encoder.encode(prompt, kept=kept) for prompt in body.prompt])
    if body.max_tokens is None:  # a long prompt shortens the default, never what the caller asked for
        params = params.within(max(map(len, prompts)), service.max_model_len)
    echo = None
    if body.echo:
        texts = await asyncio.to_thread(
            lambda: [
                prompt if isinstance(prompt, str) and kept is None else encoder.decode(ids)
                for prompt, ids in zip(body.prompt, prompts)
            ]
        )
        firsts = [ids[0] if params.prompt_logprobs is not None else None for ids in prompts]
        echo = [Echo(text, first) for text, first in zip(texts, firsts) for _ in range(choices)]
    generation = await service.submit(call, prompts, params, body.priority, adapter)
    answer = (BestOfAnswer if params.n > choices else CompletionAnswer)(
        model=adapter or service.model_name,
        choices=choices * len(prompts),
        usage=Usage(generation.prompt_tokens),
        texts=service.texts,
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        echo=echo,
    )
    return Reply(generation, answer, body.delivery())


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", **described(CompletionRequest, streams=True))
    async def completions(request: Request) -> Response:
        return await service.respond(request, begin)

    return routes
