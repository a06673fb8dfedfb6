"""Calibration and evaluation text: where it comes from, and which part may be used for what."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qserve.checkpoint.calibration_record import ngram_hashes
from qserve.checkpoint.errors import DataError
from qserve.checkpoint.tokenizer import leading_tokens, plain_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["calibrate", "evaluate"]

SELF = "self"
"""The SOURCE that stands for text of the model's own, which ``generated_windows`` makes."""
BUILTIN_CALIBRATION_SHARE = 0.8
# A streamed dataset may be endless; this is about eight million tokens, more than any calibration uses.
DATASET_CHARACTERS = 32_000_000
_FILE_SUFFIXES = {".txt", ".text", ".md", ".json", ".jsonl", ".raw"}
_DRAWING = re.compile(r"^[\s*=\-~^#.+|_]*$")


@dataclass(frozen=True)
class Text:
    """``sha256`` is the hash of exactly ``text``, in UTF-8, so a card can say what was read. ``documents`` are its
    parts, where the source has parts: the lines of a JSONL file, the rows of a dataset. ``conversations`` are their
    messages, where they are that."""

    name: str
    text: str
    sha256: str
    documents: tuple[str, ...] = ()
    conversations: tuple[list[dict[str, Any]], ...] = field(default=(), repr=False)

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokens of the whole text; of conversations as the model's chat template writes them, one after the other.

        Raises ``DataError`` where a conversation cannot be rendered.
        """
        if not self.conversations:
            return plain_tokens(tokenizer, self.text)
        return [token for document in self.document_tokens(tokenizer) for token in document]

    def document_tokens(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
        """Tokens of each document, without those that ``leading_tokens`` puts before it. Raises as ``tokens`` does."""
        leading = leading_tokens(tokenizer)
        for number, document in enumerate(self.documents):
            if self.conversations:
                document = self._rendered(number, tokenizer)
            tokens = plain_tokens(tokenizer, document)
            begun = bool(self.conversations and leading) and tokens[: len(leading)] == leading  # by the template
            yield tokens[len(leading) :] if begun else tokens

    def _rendered(self, number: int, tokenizer: PreTrainedTokenizerBase) -> str:
        if not tokenizer.chat_template:
            raise DataError(f"{self.name} holds conversations, and the model has no chat template; give plain text")
        try:
            return str(tokenizer.apply_chat_template(self.conversations[number], tokenize=False))
        except Exception as error:  # a template is a program, and may fail in any way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.name}: the model's chat template cannot render conversation {number + 1} ({reason})"
            ) from None


def load_text(source: str, split: Split = "calibrate") -> Text:
    """The text of ``source``: ``builtin``, a text file, a JSONL file whose lines have a "text" or "messages" (of a
    chat), ``wikitext2``, or ``dataset[:config][:split]`` through ``datasets``.

    ``builtin`` gives most topics to calibration and the rest, about 20 %, to evaluation; a file is used whole for
    either; a dataset uses its train split for calibration and test (else validation) for evaluation, unless
    the source names one. Raises ``DataError`` for what is missing, unreadable, binary or empty.
    """
    path = Path(os.path.expanduser(source))
    documents: list[str] = []
    conversations: list[list[dict[str, Any]]] = []
    if source == "builtin":
        name, text = f"builtin ({split})", _builtin(split)
    elif path.is_file():
        name, text = path.name, _file(path)
        if path.suffix.lower() in (".jsonl", ".json"):
            documents, conversations = _jsonl(path, text)
            text = "\n\n".join(documents)
    elif path.suffix.lower() in _FILE_SUFFIXES or path.is_dir():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise DataError(f"{source} {problem}; give a text or JSONL file, builtin, or a dataset")
    else:
        name, documents = _dataset(source, split)
        text = "\n\n".join(documents)
    if not text.strip():
        raise DataError(f"{source} holds no text")
    try:
        return Text(name, text, hashlib.sha256(text.encode()).hexdigest(), tuple(documents), tuple(conversations))
    except UnicodeEncodeError:
        raise DataError(f"{source} holds half of a surrogate pair, which is not text") from None


def _file(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start:,} is {raw[error.start]:#04x})") from None
    if "\0" in text:
        raise DataError(f"{path} is a binary file (it holds NUL bytes), not text")
    return text


def _jsonl(path: Path, text: str) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """The lines' texts; and, where they are conversations, their messages, whose contents are the texts."""
    documents: list[str] = []
    conversations: list[list[dict[str, Any]]] = []
    # Only "\n" ends a JSONL record: splitlines() would also cut at separators that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{path}, line {number}: not valid JSON; every line must be one object") from None
        if isinstance(row, dict) and _is_chat(row.get("messages")):
            conversations.append(row["messages"])
            documents.append("\n\n".join(message["content"] for message in row["messages"]))
        elif isinstance(row, dict) and isinstance(row.get("text"), str):
            documents.append(row["text"])
        else:
            raise DataError(
                f'{path}, line {number}: expected an object with a string "text", or with "messages" that have a '
                '"role" and a "content", both strings'
            )
        if conversations and len(conversations) < len(documents):
            raise DataError(f'{path}, line {number}: some lines have "text" and others "messages"; make them alike')
    return documents, conversations


def _is_chat(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(each, dict) for each in messages)
        and all(isinstance(each.get(key), str) for each in messages for key in ("role", "content"))
    )


def _dataset(source: str, split: Split) -> tuple[str, list[str]]:
    """``wikitext2`` follows the usual protocol: the raw rows of its split, joined by blank lines."""
    wanted = "wikitext:wikitext-2-raw-v1" if source == "wikitext2" else source
    if source == "wikitext2":
        wanted = "Salesforce/" + wanted
    name, *rest = wanted.split(":")
    parts_fit = all(re.fullmatch(r"[\w.\-+\[\]%]+", part) for part in rest)
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", name) or len(rest) > 2 or not parts_fit:
        raise DataError(f"{source} is neither a file nor a dataset written as name[:config][:split]")
    try:
        import datasets

        config = rest[0] if rest else None
        choices = rest[1:] or (["train"] if split == "calibrate" else ["test", "validation"])
        available = datasets.get_dataset_split_names(name, config)
        chosen = next((choice for choice in choices if choice in available), None)
        if chosen is None:
            raise DataError(f"{source} has no split {' or '.join(choices)}; it has {', '.join(available)}")
        rows = datasets.load_dataset(name, config, split=chosen, streaming=True)
        return f"{source} ({chosen})", _texts(source, rows)
    except DataError:
        raise
    # ``datasets`` raises whatever its file systems, its builders and the network raise.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"{source} is not a file, and reading it as a dataset failed ({reason}); "
            "builtin needs no network, and a text file works too"
        ) from None


def _texts(source: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    texts, characters = [], 0
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise DataError(f'{source} has no column "text"; it has {", ".join(row)}')
        texts.append(row["text"])
        characters += len(row["text"])
        if characters >= DATASET_CHARACTERS:
            break
    return texts


@lru_cache(maxsize=2)
def _builtin(split: Split) -> str:
    """The language reference that every CPython carries, as paragraphs. The hard-wrapped lines of a paragraph become
    one line; underlines and tables are removed. Evaluation takes the last topics, each paragraph once. Calibration
    takes the others, but no paragraph that shares a run of eight words with them: some topics repeat each other.
    """
    from pydoc_data.topics import topics

    paragraphs = {topic: list(_paragraphs(topics[topic])) for topic in sorted(topics)}
    wanted = (1 - BUILTIN_CALIBRATION_SHARE) * sum(len(each) for topic in paragraphs.values() for each in topic)
    evaluate: list[str] = []
    while sum(map(len, evaluate)) < wanted:
        evaluate = paragraphs.popitem()[1] + evaluate
    evaluate = list(dict.fromkeys(evaluate))
    if split == "evaluate":
        return "\n\n".join(evaluate)
    held_out, known = ngram_hashes(evaluate), set(evaluate)
    others = (each for topic in paragraphs.values() for each in topic if each not in known)
    return "\n\n".join(each for each in others if held_out.isdisjoint(ngram_hashes([each])))


def _paragraphs(topic: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", topic):
        lines = [line for line in block.splitlines() if not _DRAWING.match(line)]
        if lines and not lines[0].lstrip().startswith("|"):
            yield " ".join(map(str.strip, lines)) if _is_prose(lines) else "\n".join(lines)


def _is_prose(lines: list[str]) -> bool:
    """Prose is mostly letters and carries one indent; code and grammar do not."""
    joined = " ".join(lines)
    letters = sum(character.isalpha() or character.isspace() for character in joined)
    return "::=" not in joined and ">>>" not in joined and letters > 0.8 * len(joined)
