"""What is measured and calibrated begins as a request does: with the BOS of a tokenizer that adds it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qserve.calibration.text import load_text
from qserve.calibration.windows import calibration_windows
from qserve.checkpoint.errors import DataError
from qserve.checkpoint.source import open_model
from qserve.checkpoint.tokenizer import leading_tokens, plain_tokens
from qserve.evals import quality
from qserve.evals.needle import Haystack, search
from qserve.evals.pieces import of_documents, sliding
from qserve.evals.quality import EvalJob
from qserve.evals.tasks import Answers
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from tests.tiny_model import save_tiny_model

WINDOW = 40
TEXT = "hello world, the lazy dog and the quick brown fox: user system. " * 10


@pytest.fixture(scope="module")
def bos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "bos", bos=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(TEXT)
    return str(path)


def an_engine(path: Path, **options: int) -> Engine:
    config = {"max_model_len": WINDOW + 1, "max_num_batched_tokens": 16, "max_num_seqs": 16, **options}
    return Engine(open_model(path), EngineConfig(kv_cache_dtype="fp32", threads=1, **config))  # type: ignore[arg-type]


def losses(path: Path, windows: Tensor) -> Tensor:
    """The losses of transformers, float64 [windows, length - 1]."""
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)(windows).logits[:, :-1]
    return -logits.double().log_softmax(-1).gather(-1, windows[:, 1:, None])[..., 0]


def test_the_engine_and_the_windows_have_one_rule(bos_model: Path, tiny_model: Path) -> None:
    for path, expected in ((bos_model, [0]), (tiny_model, [])):
        engine = an_engine(path)
        assert leading_tokens(engine.tokenizer) == expected
        assert engine.encode("hello") == [*expected, *plain_tokens(engine.tokenizer, "hello")]


def test_every_window_that_is_measured_begins_with_bos(bos_model: Path, plain: str) -> None:
    engine, job = an_engine(bos_model), EvalJob(load_text(plain, "evaluate"), 3 * WINDOW, WINDOW)
    ids = torch.tensor(plain_tokens(engine.tokenizer, TEXT)[: 3 * (WINDOW - 1)])
    windows = torch.cat([torch.zeros(3, 1, dtype=torch.int64), ids.reshape(3, WINDOW - 1)], dim=1)
    assert quality.pieces_of(job, engine.source)[1].tokens.tolist() == windows[1].tolist()
    card = quality.measure(engine, an_engine(bos_model), job).card
    assert card.perplexity == pytest.approx(math.exp(float(losses(bos_model, windows).mean())), rel=1e-3)
    assert card.tokens == ids.numel() and card.bos and "begin with BOS" in "\n".join(card.summary())


def test_without_an_adding_tokenizer_nothing_is_added(tiny_model: Path, plain: str) -> None:
    source, job = open_model(tiny_model), EvalJob(load_text(plain, "evaluate"), 3 * WINDOW, WINDOW)
    ids = plain_tokens(source.tokenizer(), TEXT)
    assert quality.pieces_of(job, source)[1].tokens.tolist() == ids[WINDOW : 2 * WINDOW]
    assert not job.setting(source).bos


def test_sliding_windows_and_documents_begin_with_it_too() -> None:
    pieces = sliding(range(100, 200), 50, 20, 8, leading=[7])
    assert {int(piece.tokens[0]) for piece in pieces} == {7} and [len(piece.tokens) for piece in pieces] == [20] * 4
    scored = [int(token) for piece in pieces for token in piece.tokens[piece.first :]]
    assert scored == list(range(100, 143)), "every token once, the first too"
    consecutive = sliding(range(100, 200), 60, 20, 20, leading=[7])
    assert [int(token) for piece in consecutive for token in piece.tokens[piece.first :]] == list(range(100, 157))
    documents = of_documents([[1], [2, 3], list(range(10, 22))], 100, 10, leading=[7])
    assert [piece.tokens.tolist() for piece in documents] == [
        [7, 1], [7, 2, 3], [7, *range(10, 19)], [7, *range(19, 22)]
    ]  # fmt: skip
    assert all(piece.first == 1 for piece in documents)


def test_calibration_windows_begin_with_it(bos_model: Path, plain: str, tmp_path: Path) -> None:
    """The scales of the cache hold the keys of BOS, which are the largest of this model."""
    model = LlamaForCausalLM.from_pretrained(bos_model)
    with torch.no_grad():  # the channel that BOS alone has is the one that makes long keys
        model.model.embed_tokens.weight[:, 0] = 0.0
        model.model.embed_tokens.weight[0] = torch.nn.functional.one_hot(torch.tensor(0), 64) * 1.0
        for layer in model.model.layers[:1]:
            layer.self_attn.k_proj.weight[:, 0] = 20.0
    scales = {}
    for name in ("bos", "plain"):
        path = save_tiny_model(tmp_path / name, bos=name == "bos")
        model.save_pretrained(path)
        job = QuantizeJob(method="rtn", bits=8, group_size=32, kv_cache="fp8", samples=4, sequence_length=16,
                          calibration=plain)  # fmt: skip
        pipeline.run(open_model(path), tmp_path / f"{name}-out", job)
        scales[name] = float(open_model(tmp_path / f"{name}-out").tensor("model.layers.0.self_attn.k_scale"))
    assert scales["bos"] > 5 * scales["plain"]
    windows = calibration_windows(range(100, 200), 4, 16, 0, leading=[7])
    assert windows.shape == (4, 16) and set(windows[:, 0].tolist()) == {7} and 7 not in windows[:, 1:]


def test_needles_and_cut_tasks_begin_with_it(bos_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    score = Engine.score

    def noted(self: Engine, tokens: list[int]) -> object:
        asked.append(tokens)
        return score(self, tokens)

    monkeypatch.setattr(Engine, "score", noted)
    search(open_model(bos_model), list(range(40, 240)) * 2, Haystack((80,), (0.0, 1.0), 1), ("fp32",), threads=1)
    answers = Answers(an_engine(bos_model))
    answers.loglikelihood("the quick brown fox " * 40, "hello")
    answers.rolling("the quick brown fox " * 40)
    assert len(asked) > 6 and all(tokens[0] == 0 and 0 not in tokens[1:] for tokens in asked)
    assert all(len(tokens) == 80 for tokens in asked[:3])


def chats(path: Path, *conversations: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    return str(path)


def test_conversations_go_through_the_chat_template(bos_model: Path, tmp_path: Path) -> None:
    one = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    text = load_text(chats(tmp_path / "chat.jsonl", one, one[:1]))
    assert text.text == "hello\n\nworld\n\nhello"
    tokenizer = open_model(bos_model).tokenizer()
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n"
    expected = [plain_tokens(tokenizer, rendered), plain_tokens(tokenizer, "<|im_start|>user\nhello<|im_end|>\n")]
    assert list(text.document_tokens(tokenizer)) == expected and text.tokens(tokenizer) == [*expected[0], *expected[1]]
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    assert list(text.document_tokens(tokenizer)) == expected, "the windows have the BOS, once"


def test_conversations_that_cannot_be_used(bos_model: Path, tmp_path: Path) -> None:
    tokenizer = open_model(bos_model).tokenizer()
    refused = load_text(chats(tmp_path / "a.jsonl", [{"role": "user", "content": "refuse me"}]))
    with pytest.raises(DataError, match="cannot render conversation 1"):
        refused.tokens(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        refused.tokens(tokenizer)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    with pytest.raises(DataError, match="line 2: some lines"):
        load_text(str(mixed))
    mixed.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(DataError, match='"content"'):
        load_text(str(mixed))
