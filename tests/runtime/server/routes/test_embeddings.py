"""``/v1/embeddings`` against the hidden states of transformers, and ``/tokenize`` against the tokenizer."""

from __future__ import annotations

import base64
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.server.serve import ServerHandle
from qserve.runtime.step_plan import StepPlan

HEADERS = {"Authorization": "Bearer first-key"}
TEXTS = ["the quick brown fox", "lazy", "hello world, " * 12, "system user assistant"]


def embed(server: ServerHandle, **body: Any) -> list[Any]:
    response = httpx.post(f"{server.url}/embeddings", json=body, headers=HEADERS, timeout=60)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_they_are_those_of_transformers(server: ServerHandle, engine: Engine, pooling: str) -> None:
    if not Path(engine.source.path).is_dir():
        pytest.skip("transformers would round its weights differently")
    model = AutoModelForCausalLM.from_pretrained(engine.source.path, dtype=torch.float32).eval()
    for text, found in zip(TEXTS, embed(server, input=TEXTS, pooling=pooling), strict=True):
        ids = torch.tensor([server.service.encoder.encode(text)])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states[-1][0].double()
        expected = states.mean(0) if pooling == "mean" else states[-1]
        vector = torch.tensor(found, dtype=torch.float64)
        assert torch.nn.functional.cosine_similarity(vector, expected, dim=0) > 0.9999
        assert math.isclose(vector.norm(), 1.0, rel_tol=1e-6)


def test_a_batch_and_neighbours_change_no_bit(server: ServerHandle) -> None:
    alone = [embed(server, input=text)[0] for text in TEXTS]
    busy = {"prompt": TEXTS, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "seed": 1}
    ids = [server.service.encoder.encode(text) for text in TEXTS]
    quiet = httpx.post(f"{server.url}/completions", json=busy, headers=HEADERS, timeout=60).json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        neighbours = pool.submit(
            lambda: httpx.post(f"{server.url}/completions", json=busy, headers=HEADERS, timeout=60)
        )
        for _ in range(3):
            assert embed(server, input=TEXTS) == alone
            assert embed(server, input=ids) == alone
        assert neighbours.result().json()["choices"] == quiet
    assert embed(server, input=ids[0]) == alone[:1]


def test_chunks_change_no_bit_and_no_logits_are_computed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(7 * i) % 300 + 3 for i in range(90)]
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling="mean")
    found = []
    plans: list[StepPlan] = []
    for budget in (512, 7):
        config = EngineConfig(
            max_num_batched_tokens=budget, max_num_seqs=min(budget, 64), kv_cache_memory=4 << 20, threads=2
        )
        engine = Engine(str(tiny_model), config)
        run = engine.runner.run
        monkeypatch.setattr(engine.runner, "run", lambda plan, sink, run=run: plans.append(plan) or run(plan, sink))
        for _ in range(2):  # the second could find the first in the prefix cache
            engine.submit("mine", prompt, params)
            outputs = []
            while engine.has_work():
                outputs += engine.step()
                engine.check()
            (output,) = outputs
            assert (output.finish_reason, output.output_tokens, output.token_ids) == ("stop", 0, [])
            found.append(output.embedding)
    assert all(vector == found[0] for vector in found)
    assert len(plans) == 2 * (1 + 13) and not any(each.num_sampled for plan in plans for each in plan.sequences)
    with pytest.raises(RequestError):
        SamplingParams(pooling="mean")


def test_the_official_client(client: openai.OpenAI, model: str, engine: Engine) -> None:
    answer = client.embeddings.create(model=model, input=TEXTS)  # asks for base64 unless numpy is missing
    assert answer.object == "list" and answer.model == model
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    vectors = [item.embedding for item in answer.data]
    assert all(len(vector) == engine.limits.hidden_size for vector in vectors)
    plain = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert np.array_equal(np.float32([item.embedding for item in plain.data]), np.float32(vectors))


def test_dimensions_and_base64(server: ServerHandle) -> None:
    (full,) = embed(server, input="the lazy dog")
    (short,) = embed(server, input="the lazy dog", dimensions=16)
    assert len(short) == 16 and math.isclose(math.hypot(*short), 1.0, rel_tol=1e-6)
    scale = math.hypot(*full[:16])
    assert short == pytest.approx([value / scale for value in full[:16]])
    (encoded,) = embed(server, input="the lazy dog", encoding_format="base64")
    assert np.array_equal(np.frombuffer(base64.b64decode(encoded), "<f4"), np.float32(full))


def test_tokenize_and_back(server: ServerHandle) -> None:
    base = server.url.removesuffix("/v1")

    def ask(path: str, **body: Any) -> Any:
        response = httpx.post(f"{base}/{path}", json=body, headers=HEADERS, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    text = "the quick brown <|im_start|> fox 🦊"
    found = ask("tokenize", prompt=text)
    assert found["tokens"] == server.service.encoder.encode(text)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == server.service.max_model_len
    assert found["token_strs"] is None
    named = ask("tokenize", prompt=text, return_token_strs=True, add_special_tokens=False)
    assert len(named["token_strs"]) == named["count"] and "<|im_start|>" in named["token_strs"]
    assert ask("detokenize", tokens=found["tokens"]) == {"prompt": text}
    assert ask("detokenize", tokens=[]) == {"prompt": ""}
    message = {"role": "user", "content": "hello <|im_end|>"}
    chat = ask("tokenize", messages=[message], model=server.service.model_name)
    assert chat["tokens"] == server.service.encoder.chat([message])
    assert ask("detokenize", tokens=chat["tokens"])["prompt"].endswith("assistant\n")
    assert httpx.post(f"{base}/tokenize", json={"prompt": text}).status_code == 401
