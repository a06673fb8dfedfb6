"""``score_pairs``: how well two texts fit each other, by the model that is served.

A reranker judges each pair with its classification head. An embedding model compares the vectors of the two texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request

from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.openai.pooling_request import ScoreOptions
from qserve.runtime.server.service import Service

# Qwen3-Reranker was trained with these words.
_QWEN3_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


async def score_pairs(
    service: Service, request: Request, pairs: Sequence[tuple[str, str]], options: ScoreOptions
) -> tuple[list[float], int]:
    """A score for each (query, document), and the tokens that were computed. Raises ``RequestError``."""
    classes = service.engine.info.classes
    if options.instruction is not None and not (classes and classes.qwen3):
        raise RequestError("instruction is for models served with --reranker qwen3", "instruction")
    if classes is None:
        return await _compare(service, request, pairs, options)
    if options.pooling is not None:
        raise RequestError("pooling is for embedding models; this one has a classification head", "pooling")
    if len(classes.labels) != 1:
        raise RequestError(f"this model tells {len(classes.labels)} classes apart, a score needs one; use /classify")
    encoder = service.encoder
    if classes.qwen3:
        instruction = options.instruction or _QWEN3_INSTRUCTION
        texts = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {text}" for query, text in pairs]
        prompts = await asyncio.to_thread(encoder.within, _QWEN3_BEFORE, texts, _QWEN3_AFTER)
    else:
        prompts = await asyncio.to_thread(encoder.pairs, pairs)
    logits, tokens = await service.pool(request, prompts, _params("classify", options), options.priority)
    return [score for each in logits for score in (classes.probabilities(each) if options.activates else each)], tokens


async def _compare(
    service: Service, request: Request, pairs: Sequence[tuple[str, str]], options: ScoreOptions
) -> tuple[list[float], int]:
    """The cosines of the texts' vectors. Each text is computed once."""
    pooling = options.pooling or service.pooling
    if pooling is None:
        raise RequestError(
            "this model scores nothing: it has no classification head and does not say that it makes embeddings; "
            "ask for pooling mean or last, or serve a reranker (Qwen3-Reranker with --reranker qwen3)",
            "model",
        )
    encoder, texts = service.encoder, list(dict.fromkeys(text for pair in pairs for text in pair))
    prompts = await asyncio.to_thread(lambda: [encoder.encode(text) for text in texts])
    found, tokens = await service.pool(request, prompts, _params(pooling, options), options.priority)
    vectors = dict(zip(texts, found, strict=True))
    return [sum(a * b for a, b in zip(vectors[query], vectors[text])) for query, text in pairs], tokens


def _params(pooling: str, options: ScoreOptions) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, timeout=options.timeout)
