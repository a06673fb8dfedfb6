"""``CalibrationRecord``: the text that a checkpoint was calibrated on, stored inside it as ``calibration.json``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.files import read_json_object

CALIBRATION_FILE = "calibration.json"
N = 8
_KEPT = 4096


@dataclass(frozen=True)
class CalibrationRecord:
    """``data_sha256`` is the hash of the whole text, ``tokens`` how many of it were read. ``ngrams`` are hashes of runs
    of eight words in these, the smallest ones where there are more than 4,096: a sample that two texts agree on."""

    data_name: str
    data_sha256: str
    tokens: int
    ngrams: tuple[int, ...]

    @classmethod
    def of(cls, data_name: str, data_sha256: str, tokens: int, read: Iterable[str]) -> CalibrationRecord:
        return cls(data_name, data_sha256, tokens, tuple(sorted(ngram_hashes(read))[:_KEPT]))

    def share(self, texts: Iterable[str]) -> float:
        """The share, 0 to 1, of the runs of eight words in ``texts`` that were calibrated on: an estimate where only a
        sample of the hashes was kept."""
        largest = self.ngrams[-1] if len(self.ngrams) == _KEPT else 2**64
        comparable = {each for each in ngram_hashes(texts) if each <= largest}
        return len(comparable.intersection(self.ngrams)) / max(1, len(comparable))

    def to_json(self) -> dict[str, Any]:
        return {
            "data_name": self.data_name,
            "data_sha256": self.data_sha256,
            "tokens": self.tokens,
            "ngrams": " ".join(f"{each:016x}" for each in self.ngrams),
        }


def ngram_hashes(texts: Iterable[str]) -> set[int]:
    """64-bit hashes of all runs of eight words; case, spaces and punctuation do not count."""
    found: set[int] = set()
    for text in texts:
        words = re.findall(r"\w+", text.casefold())
        for start in range(len(words) - N + 1):
            run = " ".join(words[start : start + N]).encode("utf-8", "surrogatepass")
            found.add(int.from_bytes(hashlib.blake2b(run, digest_size=8).digest()))
    return found


def read_calibration(directory: Path) -> CalibrationRecord | None:
    """The record stored in a checkpoint directory, or None where there is none."""
    path = directory / CALIBRATION_FILE
    if not path.exists():
        return None
    content = read_json_object(path)
    try:
        name, sha256, tokens = content["data_name"], content["data_sha256"], content["tokens"]
        ngrams = tuple(int(each, 16) for each in content["ngrams"].split())
        if not (isinstance(name, str) and isinstance(sha256, str) and isinstance(tokens, int)):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path} is malformed: it must name a text, its hash, tokens and hashes") from None
    return CalibrationRecord(name, sha256, tokens, ngrams)
