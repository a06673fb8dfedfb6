"""The pictures in the documents: each is there, small, and shown somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_picture_is_there_and_every_one_that_is_there_is_shown() -> None:
    shown = {
        (path.parent / name).resolve()
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    }
    assert shown == set((ROOT / "docs").resolve().glob("*.png"))
    assert all(path.stat().st_size < 120_000 for path in shown)
