"""``qserve chat``: a conversation in the terminal, with a model in this process or any OpenAI-compatible server.

Control characters in a model's answer are made harmless before they are shown: an answer must not command the terminal.
"""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from qserve import console
from qserve.chat_client import Answer, ChatClient, Piece, api_url
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.runtime.config import EngineConfig
from qserve.runtime.sampling import RequestError, SamplingParams

_MAX_LINE = 4 << 20  # characters of a message from a pipe

HELP = """\
/reset        begin a new conversation; the system prompt stays
/system TEXT  set the system prompt, without TEXT remove it
/save FILE    write the conversation as JSON, as a request's "messages"
/help         show this
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with a slash is sent with a space before it."""

# All of C0 and C1 except tab and newline: escape sequences begin with one of them.
_HARMLESS = dict.fromkeys([*range(0x20), 0x7F, *range(0x80, 0xA0)], "\N{REPLACEMENT CHARACTER}")
del _HARMLESS[ord("\n")], _HARMLESS[ord("\t")]
_HARMLESS[ord("\r")] = ""  # part of the line ends that some write


@dataclass
class Chat:
    """A conversation: lines in, answers out.

    With ``terminal`` there is a prompt, a failed message is one line, and Ctrl-C ends an answer. Without it, each line
    of ``lines`` is a message, and a failure or an interruption ends the program.
    """

    client: ChatClient
    system: str | None = None
    terminal: bool = True
    lines: TextIO = field(default_factory=lambda: sys.stdin)
    history: list[dict[str, str]] = field(default_factory=list)
    _written: set[Path] = field(default_factory=set)

    def run(self) -> None:
        """Converse until /exit or the end of the input."""
        while (line := self._read()) is not None:
            try:
                if line.startswith("/"):
                    if not self._command(*line.split(maxsplit=1)):
                        return
                elif line.strip():
                    self._answer(line.strip())
            except (QServeError, OSError) as error:
                if not self.terminal:
                    raise
                console.error(_harmless(str(error)))
            except KeyboardInterrupt:  # another one, while an answer was being stopped
                if not self.terminal:
                    raise

    def messages(self) -> list[dict[str, str]]:
        """The messages of the next request."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.history

    def _read(self) -> str | None:
        """A line; None at the end."""
        while True:
            try:
                if self.terminal:
                    return input("> ")
                line = self.lines.readline(_MAX_LINE)
                return line.rstrip("\r\n") if line else None
            except EOFError:
                console.line()
                return None
            except UnicodeDecodeError:
                raise UsageError("the input is not UTF-8") from None
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                console.note("\n/exit or Ctrl-D leaves")

    def _answer(self, message: str) -> None:
        asked, answer = {"role": "user", "content": message}, Answer()
        pieces = self.client.stream([*self.messages(), asked], answer)
        try:
            for piece in pieces:
                self._show(piece)
        except KeyboardInterrupt:
            if not self.terminal:
                raise
            answer.end = "stopped"
        finally:
            pieces.close()  # the connection too: the server stops working
            if answer.first is not None:
                console.line()
        if answer.text or answer.end != "stopped":
            # A model may write NUL, and no server takes one.
            self.history += [asked, {"role": "assistant", "content": answer.text.replace("\0", "\ufffd")}]
        console.note(f"[{answer.speed()}]")

    def _show(self, piece: Piece) -> None:
        """Reasoning is dim on a terminal. A pipe gets only the answer."""
        text = _harmless(piece.text)
        if piece.is_reasoning:
            text = f"\x1b[2m{text}\x1b[0m" if self.terminal else ""
        sys.stdout.write(text)  # unchanged: a console would change tabs and markup
        sys.stdout.flush()

    def _command(self, name: str, rest: str = "") -> bool:
        """Do a slash command; False ends the conversation."""
        rest = rest.strip()
        match name:
            case "/exit":
                return False
            case "/help":
                console.line(HELP)
            case "/reset":
                self.history.clear()
                console.note("a new conversation")
            case "/system":
                self.system = rest or None
                console.note("the system prompt is set" if rest else "there is no system prompt")
            case "/save":
                self._save(rest)
            case _:
                raise UsageError(f"there is no command {name}; /help lists them")
        return True

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs the name of a file")
        path = Path(name).expanduser()
        # A file that this conversation wrote may be overwritten, but no other file.
        with path.open("w" if path.absolute() in self._written else "x", encoding="utf-8") as file:
            json.dump(self.messages(), file, indent=2, ensure_ascii=False)
            file.write("\n")
        self._written.add(path.absolute())
        console.note(f"{len(self.messages())} messages: {path}")


def with_server(
    url: str, api_key: str | None, model: str | None, system: str | None, options: dict[str, Any]
) -> None:
    """Converse with a server on standard input and output."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("--api-key must be printable ASCII")
    with ChatClient(api_url(url), api_key, model, options) as client:
        _talk(client, system)


def with_model(
    model: str, chat_template: Path | None, config: EngineConfig, system: str | None, options: dict[str, Any]
) -> None:
    """Converse with a model that is loaded for it, behind a private server whose key nobody else has."""
    try:
        SamplingParams(**options)
    except RequestError as error:
        raise UsageError(f"--{str(error.param).replace('_', '-')}: {error}") from None
    from qserve import steps
    from qserve.runtime.server.config import ServerConfig
    from qserve.runtime.server.serve import ServerHandle

    engine = steps.load(steps.open_source(model, chat_template), config)
    options = {"temperature": engine.generation_config.defaults.get("temperature", 0.7)} | options
    key = secrets.token_hex()
    with (
        ServerHandle(engine, config=ServerConfig(api_keys=(key,))) as server,
        ChatClient(server.url, key, engine.model_name, options) as client,
    ):
        _talk(client, system)


def _talk(client: ChatClient, system: str | None) -> None:
    terminal = sys.stdin.isatty()
    if terminal:
        _edit_lines()
        console.note(f"{client.model}: /help lists the commands, Ctrl-D leaves")
    Chat(client, system, terminal).run()


def _edit_lines() -> None:
    try:
        import readline  # noqa: F401  # makes input() edit and remember lines
    except ImportError:  # not on every platform
        return


def _harmless(text: str) -> str:
    return text.translate(_HARMLESS)
