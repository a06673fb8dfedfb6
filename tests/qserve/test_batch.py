"""Offline batches: the server's answers without a server, all of them, whatever ends the process in the middle."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from qserve.batch import BatchReport, run_batch
from qserve.checkpoint.errors import CheckpointError, DataError
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.batches.answer_file import AnswerFile
from qserve.runtime.server.serve import ServerHandle

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    config = EngineConfig(max_model_len=512, max_num_seqs=16, kv_cache_memory=64 << 20, threads=2)
    return Engine(str(tiny_model), config)


def request(custom_id: str, url: str = TEXT, **body: Any) -> Json:
    body = {"max_tokens": 8, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Iterable[Json | str]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def answers(path: Path) -> dict[str, Json]:
    """The answers by custom id, none of which stands twice."""
    # Not ``splitlines``: an answer may hold other ends of lines than "\n".
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    keyed = {answer["custom_id"] or answer["id"]: answer for answer in found}
    assert len(keyed) == len(found)
    return keyed


def run(engine: Engine, lines: Path, out: Path) -> BatchReport:
    with AnswerFile(out) as file:
        return run_batch(engine, lines, file)


def content(body: Json) -> Json:
    """An answer without what differs each time."""
    return {key: value for key, value in body.items() if key not in ("id", "created")}


@pytest.mark.slow
def test_a_thousand_lines(engine: Engine, tmp_path: Path) -> None:
    lines = [request(f"n{i}", prompt=f"the fox {i}", temperature=0, max_tokens=4) for i in range(1000)]
    report = run(engine, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert (report.lines, report.answered, report.failed, report.skipped) == (1000, 1000, 0, 0)
    assert report.completion_tokens == 4000
    found = answers(tmp_path / "out.jsonl")
    assert found.keys() == {line["custom_id"] for line in lines}
    assert all(answer["response"]["status_code"] == 200 and answer["error"] is None for answer in found.values())
    engine.check()
    again = run(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (again.skipped, again.answered) == (1000, 0)


def test_the_answers_are_those_of_the_server(engine: Engine, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    lines = [
        request("chat", CHAT, messages=messages, seed=7, logprobs=True, top_logprobs=2),
        request("text", TEXT, prompt=["the fox", "the dog"], n=2, seed=8, echo=True, logprobs=1),
        request("ids", TEXT, prompt=[5, 6, 7], temperature=0),
        request("bad value", TEXT, prompt="x", temperature=-1),
        request("bad field", CHAT, messages=messages, no_such_field=1),
        request("other model", CHAT, messages=messages, model="another"),
        request("no such route", "/v1/nothing"),
    ]
    report = run(engine, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert report.failed == 4
    found = answers(tmp_path / "out.jsonl")
    with ServerHandle(engine) as server:
        base = server.url.removesuffix("/v1")
        for line in lines:
            theirs = httpx.post(base + line["url"], json=line["body"], timeout=60)
            ours = found[line["custom_id"]]["response"]
            assert ours["status_code"] == theirs.status_code, line
            # Which part of a prompt was cached depends on what came before.
            expected, got = content(theirs.json()), content(ours["body"])
            for body in (expected, got):
                body.get("usage", {}).pop("prompt_tokens_details", None)
            assert got == expected, line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"custom_id": "a", "custom_id": "b"}', "twice"),
        ('{"body": {}}', "needs a custom_id"),
        ({"custom_id": 5}, "needs a custom_id"),
        (request("x") | {"method": "GET"}, "method"),
        (request("x") | {"url": "http://example.com/v1"}, "url"),
        (request("x") | {"body": "text"}, "body"),
        (request("x") | {"extra": 1}, "'extra'"),
        (request("x", prompt="a", stream=True), "stream"),
        ("x" * (10 << 20), "bytes"),
    ],
)
def test_a_bad_line_gives_an_error_and_the_rest_goes_on(engine, tmp_path, line, words) -> None:
    lines = write(tmp_path / "in.jsonl", [line, "", request("good", prompt="the fox")])
    report = run(engine, lines, tmp_path / "out.jsonl")
    assert (report.answered, report.failed) == (2, 1)
    found = answers(tmp_path / "out.jsonl")
    assert found.pop("good")["response"]["status_code"] == 200
    (bad,) = found.values()
    assert bad["response"] is None and words in bad["error"]["message"]
    assert run(engine, lines, tmp_path / "out.jsonl").skipped == 2


def test_more_choices_than_may_wait(tiny_model: Path, tmp_path: Path) -> None:
    config = EngineConfig(max_model_len=128, max_num_seqs=4, max_waiting=8, kv_cache_memory=32 << 20, threads=1)
    lines = [request(f"n{i}", prompt=f"fox {i}", n=7) for i in range(20)] + [request("never", prompt="a", n=9)]
    report = run(Engine(str(tiny_model), config), write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert (report.answered, report.failed) == (21, 1)
    found = answers(tmp_path / "out.jsonl")
    assert found.pop("never")["response"]["status_code"] == 400
    assert all(answer["response"]["status_code"] == 200 for answer in found.values())


def test_an_engine_that_ends_ends_the_run_and_keeps_what_is_done(tiny_model, tmp_path, monkeypatch) -> None:
    config = EngineConfig(max_model_len=128, max_num_seqs=4, kv_cache_memory=32 << 20, threads=1)
    engine = Engine(str(tiny_model), config)
    stats, calls = engine.stats, iter(range(100))

    def dying() -> Any:
        if next(calls) > 20:
            raise RuntimeError("a defect outside of a step")
        return stats()

    monkeypatch.setattr(engine, "stats", dying)
    lines = write(tmp_path / "in.jsonl", [request(f"n{i}", prompt="the fox") for i in range(40)])
    with pytest.raises(Exception, match="engine has stopped"):
        run(engine, lines, tmp_path / "out.jsonl")
    kept = len(answers(tmp_path / "out.jsonl"))
    assert kept < 40
    monkeypatch.setattr(engine, "stats", stats)
    assert run(engine, lines, tmp_path / "out.jsonl").skipped == kept
    assert len(answers(tmp_path / "out.jsonl")) == 40


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_where_it_was(engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    texts = [request(f"n{i}", prompt=f"the fox {i}", seed=i, max_tokens=40) for i in range(150)]
    lines, out = write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl"
    command = ["batch", str(lines), str(out), "--model", str(tiny_model), "--max-num-seqs", "4", "--threads", "1"]
    command += ["--kv-cache-memory", "64MiB"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "qserve", *command], stdout=log, stderr=log)
        try:
            while not out.exists() or out.read_bytes().count(b"\n") < 10:
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    first = out.read_bytes()
    kept = first.count(b"\n")
    assert 10 <= kept < 150
    # As if the machine had ended in the middle of a line.
    out.write_bytes(first + b'{"id": "batch_req_00000150", "custom_id": "n149", "resp')
    report = run(engine, lines, out)
    assert (report.skipped, report.answered, report.failed) == (kept, 150 - kept, 0)
    assert out.read_bytes().startswith(first[: first.rindex(b"\n") + 1])
    found = answers(out)
    assert len(found) == 150
    whole = tmp_path / "whole.jsonl"
    run(engine, lines, whole)
    for custom_id, answer in answers(whole).items():
        assert found[custom_id]["response"]["body"]["choices"] == answer["response"]["body"]["choices"]


def grammar_workers(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "qserve.runtime.grammar_worker" in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    """Nothing of a process that has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("fails", [False, True])
def test_the_worker_for_constraints_ends_with_the_run(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    append, seen = AnswerFile.append, []

    def appended(file: AnswerFile, answer: Json) -> None:
        seen.extend(grammar_workers(os.getpid()))
        append(file, answer)
        if fails:
            raise DataError("the disk is full")

    monkeypatch.setattr(AnswerFile, "append", appended)
    lines = write(tmp_path / "in.jsonl", [request("a", prompt="x", guided_choice=["yes", "no"], ignore_eos=False)])
    if fails:
        with pytest.raises(DataError, match="full"):
            run(engine, lines, tmp_path / "out.jsonl")
    else:
        assert run(engine, lines, tmp_path / "out.jsonl").failed == 0
    assert seen and not grammar_workers(os.getpid())
    engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_behind(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    slow = [{"type": "integer", "multipleOf": 999_983, "title": f"{i}"} for i in range(20)]  # a second to compile
    texts = [request(f"n{i}", prompt="x", guided_json=schema) for i, schema in enumerate(slow)]
    command = ["batch", str(write(tmp_path / "in.jsonl", texts)), str(tmp_path / "out.jsonl"), "--threads", "1"]
    command = ["env", "--default-signal=INT", sys.executable, "-m", "qserve", *command, "--model", str(tiny_model)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while len(workers := grammar_workers(process.pid)) < 2:  # it, and the child that compiles
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
    assert not psutil.wait_procs(workers, 10)[1]


@pytest.mark.slow
def test_interrupted_by_ctrl_c(tiny_model: Path, tmp_path: Path) -> None:
    lines = write(tmp_path / "in.jsonl", [request(f"n{i}", prompt="fox", max_tokens=200) for i in range(400)])
    out = tmp_path / "out.jsonl"
    command = ["batch", str(lines), str(out), "--model", str(tiny_model), "--max-num-seqs", "2", "--threads", "1"]
    # Where the tests run in the background, Ctrl-C is ignored, and children would inherit that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "qserve", *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in text and "Traceback" not in text
    assert out.read_bytes().endswith(b"\n")
    assert 3 <= len(answers(out)) < 400


def test_a_chat_template_of_ones_own(cli, tiny_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ style }}: {{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "the fox"}]
    lines = [
        request("own", CHAT, messages=messages, temperature=0, chat_template_kwargs={"style": "quick"}),
        request("same", prompt="quick: the fox", temperature=0),
    ]
    out = tmp_path / "out.jsonl"
    done = cli("batch", write(tmp_path / "in.jsonl", lines), out, "--model", tiny_model, "--chat-template", template)
    assert done.code == 0, done.err
    own, same = (answers(out)[name]["response"]["body"] for name in ("own", "same"))
    assert own["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    assert own["usage"] == same["usage"]


def test_what_is_refused_before_a_model_is_loaded(cli, tmp_path: Path) -> None:
    good, out = write(tmp_path / "in.jsonl", [request("a", prompt="x")]), tmp_path / "out.jsonl"
    twice = write(tmp_path / "twice.jsonl", [request("a"), "", request("b"), request("a")])
    model = ("--model", tmp_path / "no-model")
    cli("batch", twice, out, *model).refused(1, "lines 1 and 4", "'a'")
    cli("batch", write(tmp_path / "empty.jsonl", []), out, *model).refused(1, "holds no request")
    cli("batch", tmp_path / "absent.jsonl", out, *model).refused(1, "absent.jsonl cannot be read")
    assert not out.exists()
    cli("batch", good, good, *model).refused(2, "same file")
    cli("batch", good, out, *model, "--max-waiting", 0).refused(2, "--max-waiting")
    cli("batch", good, tmp_path / "no" / "out.jsonl", *model).refused(1, "out.jsonl cannot be written")
    cli("batch", good, out, *model).refused(1, "no-model does not exist")


def test_a_file_that_is_no_answers_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for text in ("my notes", "my\nnotes\n", '{"custom_id": "x"}\n', '{"id": 1, "custom_id": "x"}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match="no answer of a batch"):
            AnswerFile(path)
        assert path.read_text(encoding="utf-8") == text


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "out.jsonl"), pytest.raises(DataError, match="another process"):
        AnswerFile(tmp_path / "out.jsonl")


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(engine: Engine, tmp_path: Path) -> None:
    lines = write(tmp_path / "in.jsonl", [request(f"n{i}", prompt="x") for i in range(20)])
    out = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"no space left to write .*out\.jsonl"):
            run(engine, lines, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < out.stat().st_size <= 2000
    report = run(engine, lines, out)
    assert report.skipped + report.answered == 20
    assert len(answers(out)) == 20


def test_out_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no file"):
        AnswerFile(Path("/dev/null"))
    with pytest.raises(DataError, match="is no file"):
        AnswerFile(tmp_path)
