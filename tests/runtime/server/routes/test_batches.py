"""Files and batches, as OpenAI's own client uses them: answered, bounded, private, and still there after a restart."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from qserve.checkpoint.errors import UsageError
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.batches import runner, store, upload
from qserve.runtime.server.batches.store import BatchStore
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.limits.keys import KeyRing, add_key
from qserve.runtime.server.serve import ServerHandle

Json = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _plain_http(plain_http: None) -> None:
    """In every test."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(str(tiny_model), EngineConfig(max_model_len=512, max_num_seqs=8, kv_cache_memory=32 << 20, threads=1))


@contextmanager
def served(engine: Engine, folder: Path, **options: Any) -> Iterator[openai.OpenAI]:
    with ServerHandle(engine, config=ServerConfig(batch_dir=folder, **options)) as server:
        yield client_of(server.url)
    engine.check()


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


def line(number: int | str, **body: Any) -> Json:
    body = {"prompt": "the fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
    return {"custom_id": f"n{number}", "method": "POST", "url": "/v1/completions", "body": body}


def upload_lines(client: openai.OpenAI, lines: Sequence[Json]) -> Any:
    content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")


def create(client: openai.OpenAI, lines: Sequence[Json], endpoint: Any = "/v1/completions") -> Any:
    file = upload_lines(client, lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"run": "1"}
    )


def ended(client: openai.OpenAI, id: str) -> Any:
    end = time.monotonic() + 60
    while (batch := client.batches.retrieve(id)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def answers(client: openai.OpenAI, id: str) -> dict[str, Json]:
    found = [json.loads(text) for text in client.files.content(id).text.split("\n")[:-1]]
    assert all(each.keys() == {"id", "custom_id", "response", "error"} for each in found)
    return {each["custom_id"]: each for each in found}


def test_a_batch_from_upload_to_answers(engine: Engine, tmp_path: Path) -> None:
    with served(engine, tmp_path) as client:
        made = create(client, [*(line(i) for i in range(40)), line("bad", temperature=-1)])
        assert (made.status, made.object, made.completion_window) == ("validating", "batch", "24h")
        batch = ended(client, made.id)
        assert batch.status == "completed" and batch.metadata == {"run": "1"}
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
        good, bad = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
        assert good.keys() == {f"n{i}" for i in range(40)} and bad.keys() == {"nbad"}
        assert bad["nbad"]["response"]["status_code"] == 400
        expected = client.completions.create(
            model=engine.model_name, prompt="the fox", max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
        )
        assert {each["response"]["body"]["choices"][0]["text"] for each in good.values()} == {expected.choices[0].text}
        listed = client.files.list(purpose="batch")
        assert [file.id for file in listed.data] == [batch.input_file_id]
        assert {file.purpose for file in client.files.list().data} == {"batch", "batch_output"}
        for id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            assert client.files.delete(id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.output_file_id)
    kept = BatchStore(tmp_path, 1 << 30)
    kept.check()
    assert not kept.files and len(kept.batches) == 1
    kept.close()


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([line(1), line(1)], "duplicate_custom_id"),
        ([line(1), {"custom_id": "x"}], "invalid_request"),
        ([line(1) | {"url": "/v1/embeddings"}], "mismatched_endpoint"),
        ([], "empty_file"),
    ],
)
def test_a_file_that_is_no_batch_says_which_line(engine: Engine, tmp_path: Path, lines: list[Json], code: str) -> None:
    with served(engine, tmp_path) as client:
        batch = ended(client, create(client, lines).id)
        assert batch.status == "failed" and batch.output_file_id is None
        (error,) = batch.errors.data
        assert error.code == code and (error.line == 2 or len(lines) < 2)


def test_a_server_that_starts_again_goes_on(engine: Engine, tmp_path: Path) -> None:
    with served(engine, tmp_path) as client:
        made = create(client, [line(i, max_tokens=100) for i in range(100)])
        while client.batches.retrieve(made.id).request_counts.completed < 5:
            time.sleep(0.01)
    with (tmp_path / "batches" / f"{made.id}.answers.jsonl").open("rb+") as file:
        before = len(file.read().splitlines())
        file.write(b'{"id": "batch_req_')  # a line that was cut short
    (tmp_path / "files" / "0123.part").write_bytes(b"half of an upload")
    assert 5 <= before < 100
    with served(engine, tmp_path) as client:
        batch = ended(client, made.id)
        assert batch.status == "completed" and batch.request_counts.completed == 100 and batch.error_file_id is None
        assert answers(client, batch.output_file_id).keys() == {f"n{i}" for i in range(100)}
    assert not [*tmp_path.rglob("*.part")] and not [*tmp_path.rglob("*.answers.jsonl")]


def test_what_a_server_that_ends_says_is_no_answer(tmp_path: Path) -> None:
    """Such as the 500 of a request that is aborted. Before, some lines of a batch were lost to it."""
    kept = BatchStore(tmp_path, 1 << 20)
    path = kept.new_path()
    path.write_text("".join(json.dumps(line(i)) + "\n" for i in range(5)))
    batch = kept.add_batch("", "/v1/completions", kept.add_file(path, "", "in.jsonl", "batch").id, None)

    async def scenario() -> None:
        asked, ending = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.set()
            await ending.wait()
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        running = asyncio.create_task(runner.BatchRunner(kept, KeyRing()).run(app, ending.is_set))
        await asked.wait()
        ending.set()
        for _ in range(20):  # the answers arrive before the runner is stopped
            await asyncio.sleep(0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert batch.status == "in_progress" and batch.answered == 0
    assert kept.answers_path(batch).read_bytes() == b""
    kept.close()


def test_a_cancelled_batch_keeps_its_answers(engine: Engine, tmp_path: Path) -> None:
    with served(engine, tmp_path) as client:
        made = create(client, [line(i, max_tokens=200) for i in range(200)])
        while client.batches.retrieve(made.id).request_counts.completed < 2:
            time.sleep(0.01)
        with pytest.raises(openai.ConflictError):
            client.files.delete(made.input_file_id)
        assert client.batches.cancel(made.id).status == "cancelling"
        batch = ended(client, made.id)
        count = batch.request_counts.completed
        assert batch.status == "cancelled" and 2 <= count < 200
        assert len(answers(client, batch.output_file_id)) == count
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(made.id)


@pytest.mark.slow
def test_a_batch_expires(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WINDOW", 1)
    with served(engine, tmp_path) as client:
        batch = ended(client, create(client, [line(i, max_tokens=400) for i in range(2000)]).id)
        assert batch.status == "expired" and batch.request_counts.completed < 2000
        done = answers(client, batch.output_file_id) if batch.output_file_id else {}
        late = answers(client, batch.error_file_id)
        assert len(done) == batch.request_counts.completed and len(done) + len(late) == 2000
        assert {each["error"]["code"] for each in late.values()} == {"batch_expired"}
        assert not any(each["response"] for each in late.values())


def test_one_key_never_sees_what_another_has(engine: Engine, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    alice, bob = add_key("alice", keys), add_key("bob", keys)
    keys.write_text(keys.read_text().replace('name = "alice"', 'max_requests = 2\nname = "alice"'))
    with ServerHandle(engine, config=ServerConfig(batch_dir=tmp_path / "b", api_keys_file=keys)) as server:
        hers, his = client_of(server.url, alice), client_of(server.url, bob)
        batch = ended(hers, create(hers, [line(i) for i in range(10)]).id)
        assert batch.status == "completed" and batch.request_counts.completed == 10, "in spite of her limit"
        assert not his.files.list().data and not his.batches.list().data
        for refused in (
            lambda: his.files.retrieve(batch.input_file_id),
            lambda: his.files.content(batch.output_file_id),
            lambda: his.files.delete(batch.input_file_id),
            lambda: his.batches.retrieve(batch.id),
            lambda: his.batches.cancel(batch.id),
            lambda: his.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        with pytest.raises(openai.AuthenticationError):
            client_of(server.url, "wrong").files.list()


def test_whoever_waits_goes_before_a_batch(engine: Engine, tmp_path: Path) -> None:
    with served(engine, tmp_path) as client:
        made = create(client, [line(i, max_tokens=300) for i in range(60)])
        while client.batches.retrieve(made.id).request_counts.completed < 1:
            time.sleep(0.01)
        client.completions.create(model=engine.model_name, prompt="x", max_tokens=4)
        assert client.batches.retrieve(made.id).request_counts.completed < 60
        client.batches.cancel(made.id)
        ended(client, made.id)


def test_everything_has_a_bound(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FILES", 3)
    monkeypatch.setattr(upload, "MAX_FILE", 1000)
    monkeypatch.setattr(runner, "MAX_LINES", 2)
    with served(engine, tmp_path, batch_dir_size=4000) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=io.BytesIO(b"x" * 100_000), purpose="batch")
        assert caught.value.status_code == 413
        batch = ended(client, create(client, [line(i, prompt="x", max_tokens=1) for i in range(3)]).id)
        assert batch.errors.data[0].code == "too_many_tasks"
        for _ in range(2):
            upload_lines(client, [line(1)])
        with pytest.raises(openai.APIStatusError) as caught:
            upload_lines(client, [line(1)])
        assert caught.value.status_code == 413 and "3 files" in str(caught.value)
    with served(engine, tmp_path / "small", batch_dir_size=1100) as client:
        with pytest.raises(openai.APIStatusError, match="no room left"):
            upload_lines(client, [line(i) for i in range(9)])
        batch = ended(client, create(client, [line(1)]).id)
        assert batch.status == "failed" and batch.errors.data[0].code == "batch_failed"
    for folder in (tmp_path, tmp_path / "small"):
        assert not [*(folder / "files").glob("*.part")]


@pytest.mark.parametrize(
    ("form", "status", "code"),
    [
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}}, 400, None),
        ({"files": {"file": ("a", b"x")}}, 400, None),
        ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, 400, None),
        ({"files": [("file", ("a", b"x")), ("file", ("b", b"y"))], "data": {"purpose": "batch"}}, 400, None),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "b" * 5000}}, 400, None),
        ({"json": {"purpose": "batch"}}, 415, "no_form"),
        ({"content": b"broken", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400, "invalid_form"),
    ],
)
def test_an_upload_that_is_none_leaves_nothing(
    engine: Engine, tmp_path: Path, form: Json, status: int, code: str | None
) -> None:
    with served(engine, tmp_path) as client:
        answer = httpx.post(f"{client.base_url}files", **form)
        assert answer.status_code == status and answer.json()["error"]["code"] == code, answer.text
    kept = BatchStore(tmp_path, 1 << 20)
    kept.check()
    assert not kept.files and not [*tmp_path.rglob("*.part")]
    with pytest.raises(UsageError, match="is in use by another server"):
        BatchStore(tmp_path, 1 << 20)
    kept.close()


@pytest.mark.slow
def test_pages_of_a_list(engine: Engine, tmp_path: Path) -> None:
    with served(engine, tmp_path) as client:
        made = [upload_lines(client, [line(i)]).id for i in range(5)]
        assert [file.id for file in client.files.list(limit=2)] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == made
        with pytest.raises(openai.BadRequestError):
            client.files.list(after="file-x")
        with pytest.raises(openai.BadRequestError):
            client.batches.list(limit=1000)


def test_without_a_directory_there_are_none(engine: Engine) -> None:
    with ServerHandle(engine) as server, pytest.raises(openai.PermissionDeniedError, match="--batch-dir"):
        client_of(server.url).files.list()
