"""``Reference``: a base model's predictions for a text, in a file, so that the base need not fit in memory too.

Each scored token has the base's ``top`` likeliest tokens with their log-probabilities, the mass of all others together,
and the log-probability of the token that follows. The file carries its own hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qserve.checkpoint.errors import CapacityError, DataError, QServeError
from qserve.checkpoint.files import write_atomically
from qserve.evals.pieces import Piece

SUFFIX = ".safetensors"
LIMIT = 4 << 30
_FORMAT = "qserve reference 1"
_FLOOR = -700.0  # the logarithm of the remaining mass where nothing remains


class _Scores(Protocol):
    vocab_size: int
    model_name: str

    def score(self, tokens: list[int]) -> Iterator[tuple[int, Tensor]]: ...


@dataclass(frozen=True)
class Setting:
    """What a model is compared with, and on which text."""

    base_name: str
    base_sha256: str
    data_name: str
    data_sha256: str
    by: str
    window: int
    stride: int
    bos: bool = False  # each window or document begins with it


@dataclass(frozen=True)
class Rows:
    """The rows of a chunk that count, their places among the piece's scored tokens, and the tokens ``following`` them.
    """

    chunk: slice
    scored: slice
    following: Tensor

    @classmethod
    def of(cls, piece: Piece, start: int, length: int) -> Rows:
        """For the rows that predict tokens ``start + 1`` to ``start + length`` of ``piece``."""
        low = max(start + 1, piece.first)
        high = max(low, min(start + 1 + length, len(piece.tokens)))
        return cls(
            slice(low - start - 1, high - start - 1), slice(low - piece.first, high - piece.first),
            piece.tokens[low:high],
        )  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """ids int32 and logprobs float32 [tokens, top], likeliest first; rest and following float32 [tokens]."""

    setting: Setting
    vocab_size: int
    vocabulary: str
    pieces: tuple[Piece, ...]
    ids: Tensor
    logprobs: Tensor
    rest: Tensor
    following: Tensor

    @property
    def model_name(self) -> str:
        return self.setting.base_name

    @property
    def top(self) -> int:
        return self.ids.shape[1]

    @property
    def rest_mean(self) -> float:
        """Mean probability, 0 to 1, of all tokens that are not stored individually."""
        return float(self.rest.double().exp().mean())

    def rows(self, number: int, rows: Rows) -> slice:
        """The places of the scored tokens ``rows`` of piece ``number``."""
        before = sum(piece.scored for piece in self.pieces[:number])
        return slice(before + rows.scored.start, before + rows.scored.stop)

    def save(self, path: Path) -> None:
        """Raises ``QServeError`` where the file cannot be written."""
        tensors = {
            "tokens": torch.cat([piece.tokens for piece in self.pieces]).int(),
            "lengths": torch.tensor([len(piece.tokens) for piece in self.pieces]),
            "first": torch.tensor([piece.first for piece in self.pieces]),
            "unit": torch.tensor([piece.unit for piece in self.pieces]),
            "ids": self.ids,
            "logprobs": self.logprobs,
            "rest": self.rest,
            "following": self.following,
        }
        about = {"setting": asdict(self.setting), "vocab_size": self.vocab_size, "vocabulary": self.vocabulary}
        metadata = {"format": _FORMAT, "about": json.dumps(about, sort_keys=True)}
        metadata["sha256"] = _sha256(metadata["about"], tensors)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save(tensors, metadata))
        except OSError as error:
            raise QServeError(f"cannot write {path}: {error.strerror or error}") from None

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Raises ``DataError`` for a file that is missing, damaged or something else."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise DataError(f"{path} is not a reference that qserve eval --save-reference wrote")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise DataError(f"{path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} cannot be read as a reference: {error}") from None
        if metadata.get("sha256") != _sha256(metadata.get("about", ""), tensors):
            raise DataError(f"{path} is damaged: its content does not have the hash that it carries")
        about = json.loads(metadata["about"])
        tokens = tensors["tokens"].long().split(tensors["lengths"].tolist())
        pieces = tuple(map(Piece, tokens, tensors["first"].tolist(), tensors["unit"].tolist()))
        columns = {name: tensors[name] for name in ("ids", "logprobs", "rest", "following")}
        return cls(Setting(**about["setting"]), about["vocab_size"], about["vocabulary"], pieces, **columns)


def stored_bytes(pieces: Sequence[Piece], top: int) -> int:
    """Bytes of the file, without its header. Raises ``CapacityError`` where that is more than 4 GiB."""
    rows = sum(piece.scored for piece in pieces)
    needed = rows * (8 * top + 8) + 4 * sum(len(piece.tokens) for piece in pieces)
    if needed > LIMIT:
        raise CapacityError(
            f"a reference of {rows:,} tokens with {top:,} log-probabilities each takes {needed / 2**30:.1f} GiB, and "
            f"{LIMIT >> 30} GiB are allowed: lower --reference-top or --tokens"
        )
    return needed


def record(
    base: _Scores, setting: Setting, vocabulary: str, pieces: Sequence[Piece], top: int,
    progress: Callable[[int, int], None] | None = None,
) -> Reference:  # fmt: skip
    """Score ``pieces`` with ``base`` and keep the ``top`` likeliest tokens at each place."""
    top = min(top, base.vocab_size)
    stored_bytes(pieces, top)
    found: list[tuple[Tensor, ...]] = []
    for number, piece in enumerate(pieces):
        for start, p in base.score(piece.tokens.tolist()):
            rows = Rows.of(piece, start, len(p))
            found.append(_kept(p[rows.chunk], rows.following, top))
        if progress:
            progress(number + 1, len(pieces))
    ids, logprobs, rest, following = (torch.cat(column) for column in zip(*found))
    return Reference(setting, base.vocab_size, vocabulary, tuple(pieces), ids, logprobs, rest, following)


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """A hash of a tokenizer's tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def _kept(p: Tensor, following: Tensor, top: int) -> tuple[Tensor, ...]:
    first = p.argmax(-1, keepdim=True)
    _, ids = p.topk(top, dim=-1)
    # Among equal values topk may put any first; the first choice must be the one that argmax names.
    place = (ids == first).int().argmax(-1, keepdim=True)
    ids = ids.scatter(1, place, ids[:, :1]).scatter(1, torch.zeros_like(place), first)
    rest = p.exp().scatter_(1, ids, 0.0).sum(-1, dtype=torch.float64)
    rest = torch.where(rest > 0, rest.clamp_min(1e-300).log(), _FLOOR)
    return ids.int(), p.gather(1, ids), rest.float(), p.gather(1, following[:, None])[:, 0]


def _sha256(about: str, tensors: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
