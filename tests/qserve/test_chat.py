"""``qserve chat``: a pipe, a terminal, a server of one's own and servers that misbehave."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qserve.chat import Chat
from qserve.chat_client import Answer, ChatClient, Piece, api_url
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.cli import app

Cli = Callable[..., Any]


class Scripted(ThreadingHTTPServer):
    """A server that answers with ``events``, one by one, and goes on only while ``gate`` is open."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.events: list[Any] = []
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()  # somebody waits at the gate
        self.left = threading.Event()  # a client went before its answer ended
        self.requests: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def says(self, *pieces: str, end: str = "stop") -> None:
        deltas = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
        finish = {"choices": [{"delta": {}, "finish_reason": end}]}
        self.events = [*deltas, finish, {"choices": [], "usage": {"completion_tokens": len(pieces)}}, "[DONE]"]


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self._send({"data": [{"id": "fox"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body) | {"key": self.headers["Authorization"]})
        if self.server.status != 200:
            self._send({"error": {"message": "no such luck"}}, self.server.status)
            return
        self.send_response(200)
        self.end_headers()
        for number, event in enumerate(self.server.events):
            if number == 1 and not self.server.gate.is_set():
                self.server.held.set()
                # Whoever leaves closes the connection, which then can be read.
                while not self.server.gate.is_set():
                    if select.select([self.connection], [], [], 0.01)[0]:
                        self.server.left.set()
                        return
            text = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {text}\n\n".encode())

    def _send(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()
        thread.join()


def talk(server: Scripted, *lines: str, **options: Any) -> Chat:
    with ChatClient(api_url(server.url), "k", None, options) as client:
        chat = Chat(client, terminal=False, lines=io.StringIO("".join(f"{line}\n" for line in lines)))
        chat.run()
    return chat


def test_history_system_prompt_reset_and_options(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.says("Hel", "lo")
    lines = ("/system Be brief.", "one", "", "two", "/reset", "three", "/system", "four", "/exit", "five")
    talk(server, *lines, top_p=0.5)
    brief = {"role": "system", "content": "Be brief."}
    one, two, three, four = ({"role": "user", "content": word} for word in ("one", "two", "three", "four"))
    hello = {"role": "assistant", "content": "Hello"}
    assert [request["messages"] for request in server.requests] == [
        [brief, one],
        [brief, one, hello, two],
        [brief, three],
        [three, hello, four],
    ]
    first = server.requests[0]
    assert first["model"] == "fox" and first["key"] == "Bearer k" and first["top_p"] == 0.5
    assert first["stream"] and first["stream_options"] == {"include_usage": True}
    out, err = capsys.readouterr()
    assert out == "Hello\n" * 4
    assert len(re.findall(r"\[TTFT \d+\.\d\d s, (?:[\d.]+ tokens/s, )?2 tokens\]", err)) == 4


def test_a_nul_that_a_model_wrote_is_not_sent_back(server: Scripted) -> None:
    server.says("a\0b")
    talk(server, "one", "two")
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "a\ufffdb"}


def test_save_writes_what_a_request_would_hold_and_no_file_of_others(server: Scripted, tmp_path: Path) -> None:
    server.says("Hello")
    path = tmp_path / "chat.json"
    chat = talk(server, "/system Be brief.", "one", f"/save {path}", "two", f"/save {path}")
    assert json.loads(path.read_text()) == chat.messages() and len(chat.messages()) == 5
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        talk(server, f"/save {path}")
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match="name of a file"):
        talk(server, "/save")


def test_what_a_model_writes_does_not_command_the_terminal(
    server: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    server.says("\x1b]0;owned\x07\x9b2J", "[bold]:smile:[/bold]\r\n\ttab")
    chat = talk(server, "hello")
    assert capsys.readouterr().out == "�]0;owned��2J[bold]:smile:[/bold]\n\ttab\n"
    assert "\x1b" in chat.history[1]["content"], "it is what it was"


def test_reasoning_is_no_part_of_the_answer(server: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    server.says("Hello")
    server.events.insert(0, {"choices": [{"delta": {"reasoning_content": "Hm."}}]})
    chat = talk(server, "hello")
    assert capsys.readouterr().out == "Hello\n" and chat.history[1]["content"] == "Hello"
    chat.terminal = True
    chat._show(Piece("Hm.", True))
    assert capsys.readouterr().out == "\x1b[2mHm.\x1b[0m"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (["nonsense"], "no JSON object"),
        (["[1]"], "no JSON object"),
        ([{"choices": [{}]}], "shape of a chat completion"),
        ([{"error": {"message": "out of luck"}}], "out of luck"),
        ([{"choices": [{"delta": {"content": "He"}}]}], "ended the connection"),
    ],
)
def test_a_server_that_misbehaves_is_one_line(server: Scripted, events: list[Any], words: str) -> None:
    server.events = events
    with pytest.raises(QServeError, match=words):
        talk(server, "hello")


def test_refusals_and_absence_are_one_line(server: Scripted, cli: Cli) -> None:
    server.status = 400
    with pytest.raises(QServeError, match="the server answered: no such luck"):
        talk(server, "hello")
    url = server.url
    server.server_close()
    cli("chat", url).refused(1, url, "refused")
    cli("chat", "ftp://example").refused(2, "http://127.0.0.1:8000")
    cli("chat", url, "--threads", 2).refused(2, "--threads")
    cli("chat", url, "--chat-template", "x").refused(2, "--chat-template")
    cli("chat", "demo", "--model", "x").refused(2, "--model")
    cli("chat", "demo", "--temperature", "-1").refused(2, "--temperature", "between")
    with pytest.raises(UsageError, match="no command /what"):
        Chat(ChatClient(url, None, "fox", {}), terminal=False, lines=io.StringIO("/what\n")).run()


def test_a_server_that_counts_nothing_has_no_speed() -> None:
    assert Answer("Hello", None, 0.5, 1.5, "stop").speed() == "TTFT 0.50 s"
    assert Answer("Hello", 11, 0.5, 1.5, "length").speed() == (
        "TTFT 0.50 s, 10.0 tokens/s, 11 tokens, cut off at the limit of tokens"
    )
    assert Answer(end="stopped").speed() == "stopped"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("https://host/", "https://host/v1"),
        ("https://host/api/v3/", "https://host/api/v3"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_the_address_of_the_api(url: str, expected: str) -> None:
    assert api_url(url) == expected


@pytest.mark.parametrize("url", ["http://", "http://a:port", "http://a:99999", "http://[::1", "http://a/?b", "x://a"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="a server is named like"):
        api_url(url)


class Terminal:
    """A program on a terminal of its own, and somebody who types."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        # Where the tests run in the background, Ctrl-C is ignored, and children would inherit that.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "qserve", *arguments]
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self, text: str) -> None:
        """Ctrl-C, until the program has shown ``text``: one that comes just before it waits for input is not heard."""
        for _ in range(12):
            self.process.send_signal(signal.SIGINT)
            try:
                return self.wait_for(text, 5)
            except TimeoutError:
                continue
        raise TimeoutError(self.shown)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Until the program has shown ``text``, not counting what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            if time.monotonic() > end:
                raise TimeoutError(f"{text!r} did not come: {self.shown!r}")
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 4096).decode(errors="replace")
        self.shown = self.shown.split(text, 1)[1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_on_a_terminal(server: Scripted) -> None:
    server.says("Hello", " world")
    terminal = Terminal("chat", server.url)
    try:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("Hello world")
        terminal.wait_for("TTFT")
        terminal.wait_for("> ")

        server.gate.clear()
        terminal.type("two\n")
        terminal.wait_for("Hello")
        assert server.held.wait(30)
        terminal.interrupt("stopped]")
        assert server.left.wait(30), "the server learns that nobody listens"
        terminal.wait_for("> ")

        terminal.interrupt("Ctrl-D leaves")
        server.gate.set()
        server.status = 500
        terminal.type("three\n")
        terminal.wait_for("no such luck")
        terminal.wait_for("> ")
        server.status = 200
        terminal.type("four\n")
        terminal.wait_for("Hello world")
        terminal.wait_for("> ")
        said = [message["content"] for message in server.requests[-1]["messages"]]
        assert said == ["one", "Hello world", "two", "Hello", "four"], "what was said stays, what failed does not"
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()


def test_a_model_in_this_process_and_a_pipe(tiny_packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = f"hello\n/save {path}\nand again\n"
    done = CliRunner().invoke(app, ["chat", str(tiny_packed), "--max-tokens", "6", "--temperature", "0"], input=lines)
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"^\[.*\d tokens?.*\]$", done.stderr, re.MULTILINE)) == 2, done.stderr
    question, answer = json.loads(path.read_text())
    assert question == {"role": "user", "content": "hello"} and answer["role"] == "assistant"
    assert "> " not in done.output
