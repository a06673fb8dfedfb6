"""The pages for users of other tools name only options and fields that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import typer

from qserve.cli import app
from qserve.commands.values import API_KEY_VARIABLES
from qserve.quantize.job import SCHEMES
from qserve.quantize.methods import METHODS
from qserve.runtime import vllm_arguments
from qserve.runtime.llm import LLM
from qserve.runtime.llm_outputs import Completion, PromptCompletions, RequestMetrics
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.server.openai.protocol import ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[2] / "docs/coming-from.md"


def tables(text: str) -> list[tuple[str, list[str]]]:
    """Of each table the heading of the second column, and its cells."""
    found = []
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        heading, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found.append((heading[1], [row[1] for row in rows]))
    return found


def test_every_option_and_field_of_the_second_columns_is_there() -> None:
    options, quantizing = (
        {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        for command in map(typer.main.get_command(app).commands.__getitem__, ("run", "quantize"))  # type: ignore[attr-defined]
    )
    values = {*SCHEMES, *METHODS, "compressed-tensors", "8", "128"}
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    offline = {*vllm_arguments.FIELDS, *vllm_arguments.NO_CHOICE, *inspect.signature(LLM).parameters, *vars(LLM)}
    known = {"`qserve run`": {*options, *API_KEY_VARIABLES}, "field of qserve": fields, "`qserve.LLM`": offline}
    known["`qserve quantize`"] = quantizing | values
    seen = tables(PAGE.read_text(encoding="utf-8"))
    pair = ["`qserve run`", "field of qserve"]
    assert [heading for heading, _ in seen] == [*pair, "`qserve.LLM`", *["`qserve quantize`"] * 2, *pair, *pair]
    for heading, cells in seen:
        named = {name for cell in cells for code in re.findall(r"`([^`]+)`", cell) for name in code.split()}
        assert len(named) > 5 and named <= known[heading], named - known[heading]


def test_no_option_of_the_second_columns_is_read_from_prose() -> None:
    (table,) = tables("| a | `qserve run` | c |\n|---|---|---|\n| `--x` | `--port`, `--nothing` | `--y` |\n")
    assert table == ("`qserve run`", ["`--port`, `--nothing`"])


def test_the_program_in_python_runs(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    small = program.replace('"out", max_model_len=4096', f'"{tiny_model}", max_model_len=256')
    assert small != program
    exec(small, {"LLM": LLM, "SamplingParams": SamplingParams})
    lines = capsys.readouterr().out
    assert lines.startswith("The capital of France is [(") and "\nNone [(" in lines


def test_the_fields_of_an_answer_are_there() -> None:
    (named,) = re.findall(r"An answer has vLLM's fields: (.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    kinds = (PromptCompletions, Completion, RequestMetrics)
    fields = {name for kind in kinds for name in (*kind.__annotations__, *vars(kind))}
    names = set(re.findall(r"`([^`]+)`", named))
    assert len(names) == 18 and names <= fields, names - fields
