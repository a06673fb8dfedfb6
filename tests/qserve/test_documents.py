"""The documents: short where a newcomer begins, and every file that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").resolve().rglob("*.md"), ROOT / "deploy/README.md"])
FOLDERS = "checkpoint kernels runtime calibration quantize evals qserve deploy docs tests .ci .github"
NAMED = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS.split()))})/[\w./*-]*)(?:::?[\w.]+)?`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


def anchors(path: Path) -> set[str]:
    """The headings of a document as GitHub names them in links."""
    headings = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> list[str]:
    """What a document names and what is not there: paths in backticks, files and headings of links."""
    text = re.sub(r"(?s)^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    missing = [name for name in NAMED.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
    for name, heading in LINK.findall(text):
        target = path.parent / name if name else path
        if not target.exists() or (heading and heading[1:] not in anchors(target)):
            missing.append(name + heading)
    return missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(path: Path) -> None:
    assert broken(path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_was_merged_whole(path: Path) -> None:
    assert re.findall(r"(?m)^(?:<{7} .*|={7}|>{7} .*)$", path.read_text(encoding="utf-8")) == []


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# One\n`runtime/engine.py` `runtime/nothing.py` [a](page.md#one) [b](#two) [c](gone.md)\n")
    assert broken(path) == ["runtime/nothing.py", "#two", "gone.md"]


def test_the_front_door_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1300
    assert len((ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_the_readme_counts_the_native_types_of_the_table() -> None:
    (counted,) = re.findall(r"(\d+) model types run natively", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(counted) == (ROOT / "docs/models.md").read_text(encoding="utf-8").count("| native |")


def test_every_document_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    queue = [ROOT / "README.md"]
    while queue:
        path = queue.pop()
        if path.suffix == ".md" and path not in seen:
            seen.add(path)
            links = LINK.findall(path.read_text(encoding="utf-8"))
            queue += [(path.parent / name).resolve() for name, _ in links if name]
    assert set(DOCUMENTS) <= {path.resolve() for path in seen}
