"""``Session``: the questions of one user, in one turn or several, and how their texts are made.

Nothing here knows servers, except how many tokens a server takes a text for (``Words``).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import DataError
from qserve.evals.lengths import MAX_TOKENS, Lengths
from qserve.evals.simulator.traffic import Arrival

# To the tokenizer of practically every model, each word with the space before it is one token.
_WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around another "
    "came come work three word must because does part even place well such here take why things help put years "
    "different away again off went old number great tell men say small every found still between name should home big "
    "give air line set own under read last never us left end along while might next sound below saw something thought"
)
COMMON = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and the length of its answer, in tokens; ``text`` if the prompt is known word by word."""

    prompt: int
    output: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one user. ``time``: seconds from the start to the first turn; the others follow the answers.

    Sessions of one ``prefix`` begin with the same ``prefix_tokens`` tokens, which the first turn's prompt includes.
    """

    time: float
    turns: tuple[Turn, ...]
    prefix: int = 0
    prefix_tokens: int = 0


def sessions_of(arrivals: Iterable[Arrival], turns: int, prompt: Lengths, output: Lengths, seed: int) -> list[Session]:
    """A session for each arrival, with ``turns - 1`` more turns of the given lengths."""
    draw = random.Random(seed)
    return [
        Session(
            each.time,
            (
                Turn(each.prompt, each.output),
                *(Turn(prompt.draw(draw, MAX_TOKENS), output.draw(draw, MAX_TOKENS)) for _ in range(turns - 1)),
            ),
            each.prefix,
            each.prefix_tokens,
        )
        for each in arrivals
    ]


class Words:
    """Texts with a wanted number of tokens, for a server whose tokenizer is not known.

    ``fixed`` tokens stand around any prompt (as those of a chat template), and a word of ``COMMON`` has ``per_word``
    tokens. ``salt`` makes the texts of each run different, so that a prefix cache does not find earlier ones.
    """

    def __init__(self, salt: str, fixed: float = 0.0, per_word: float = 1.0) -> None:
        self._salt = salt
        self.fixed = fixed
        self.per_word = per_word

    def calibrate(self, short: tuple[int, int], long: tuple[int, int]) -> None:
        """Learn both from the (words, tokens) of two prompts."""
        self.per_word = max((long[1] - short[1]) / (long[0] - short[0]), 0.05)
        self.fixed = max(0.0, short[1] - self.per_word * short[0])

    def first(self, session: Session, index: int) -> str:
        """The prompt of the first turn; no other session of this run has this ``index``."""
        turn = session.turns[0]
        if turn.text is not None:
            # The same text would come again in the next round or run, and must not be found in a prefix cache.
            return f"({self._salt}{index}) {turn.text}"
        shared = self.count(session.prefix_tokens)
        own = self.text(f"own {index}", max(1, self.count(turn.prompt - self.fixed) - shared))
        return f"{self.text(f'prefix {session.prefix}', shared)} {own}" if shared else own

    def later(self, turn: Turn, index: int, number: int) -> str:
        """The new part of turn ``number``."""
        if turn.text is not None:
            return turn.text
        return self.text(f"own {index} {number}", max(1, self.count(turn.prompt - self.fixed)))

    def count(self, tokens: float) -> int:
        """The number of words that make ``tokens`` tokens."""
        return max(0, round(tokens / self.per_word))

    def text(self, key: str, count: int) -> str:
        """``count`` words, always the same for one key of one run."""
        return " ".join(random.Random(f"{self._salt} {key}").choices(COMMON, k=count))


_PROMPTS = Path(__file__).with_name("prompts")
DATASETS = tuple(sorted(path.stem for path in _PROMPTS.glob("*.jsonl")))
"""Prompts that come with qserve, whose answers repeat much of them: ``--dataset`` takes their names."""


def dataset_path(name: str) -> Path:
    """The file of a dataset that comes with qserve, or the path as it is."""
    return _PROMPTS / f"{name}.jsonl" if name in DATASETS else Path(name)


# For running English text and the tokenizers in use; words of COMMON have one.
_TOKENS_PER_WORD = 4 / 3


def read_dataset(path: Path, turns: int, seed: int) -> Iterator[Session]:
    """Sessions without end from JSON lines in the shapes of ShareGPT (``conversations``: ``from``, ``value``), of chats
    (``messages``: ``role``, ``content``) or of pairs (``prompt`` and ``output``, ``response`` or ``completion``), in
    random order, again and again. Answers are as long as those in the file, by their words, or have the ``max_tokens``
    beside a ``prompt``.

    Raises ``DataError``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    found = [_talk(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    talks = [talk[:turns] for talk in found if talk]
    if not talks:
        raise DataError(f"{path} holds no conversation in which a user is answered")
    return _shuffled(talks, random.Random(seed))


def _shuffled(talks: Sequence[tuple[Turn, ...]], draw: random.Random) -> Iterator[Session]:
    while True:
        for talk in draw.sample(talks, len(talks)):
            yield Session(0.0, talk)


def _talk(line: str, where: str) -> tuple[Turn, ...]:
    """The questions of one line that were answered; anything before the first question is left out."""
    try:
        content: dict[str, Any] = json.loads(line)
        if "prompt" in content and "max_tokens" in content:
            prompt = str(content["prompt"])
            return (Turn(_tokens(prompt), min(MAX_TOKENS, max(1, int(content["max_tokens"]))), prompt),)
        if "prompt" in content:
            answer = next(content[key] for key in ("output", "response", "completion") if key in content)
            parts = [("user", str(content["prompt"])), ("assistant", str(answer))]
        elif "conversations" in content:
            parts = [(str(each["from"]), str(each["value"])) for each in content["conversations"]]
        else:
            parts = [(str(each["role"]), str(each["content"])) for each in content["messages"]]
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        raise DataError(f"{where}: neither conversations, messages, nor prompt and output") from None
    return tuple(
        Turn(_tokens(question), _tokens(answer), question)
        for (asker, question), (speaker, answer) in pairwise(parts)
        if asker in ("user", "human") and speaker in ("assistant", "gpt", "chatgpt", "bot") and question.strip()
    )


def _tokens(text: str) -> int:
    return min(MAX_TOKENS, max(1, round(len(text.split()) * _TOKENS_PER_WORD)))
