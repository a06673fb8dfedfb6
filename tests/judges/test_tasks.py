"""lm-eval runs tasks on the engine in one process: its figures must be those of the engine's own log-likelihoods."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from qserve.checkpoint.source import open_model
from qserve.evals.tasks import Answers
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

pytestmark = pytest.mark.judges

# lm-eval's packages come last, so that those which both have are ours.
QSERVE = "import sys; sys.path.append(sys.argv.pop(1)); from qserve.cli import main; main()"
HEAD = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
TASKS = {
    "fox": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "read": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
""",
    "write": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "."], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
DOCUMENTS = tuple(
    (f"the quick brown {word} and the lazy", ("dog", "user assistant", f"{word} world"))
    for word in ("fox", "dog", "user", "hello", "system", "café")
)


def test_tasks_of_base_and_quantized_side_by_side(
    environment, judge, tiny_model: Path, tiny_packed: Path, tmp_path: Path
) -> None:
    (site,) = (environment("lm-eval") / "lib").glob("python*/site-packages")
    data, report, gate = tmp_path / "fox.jsonl", tmp_path / "r.json", tmp_path / "gate.toml"
    rows = [{"question": question, "choices": choices, "answer": 0} for question, choices in DOCUMENTS]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    for name, body in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n" + HEAD.format(data=data) + body, encoding="utf-8")
    gate.write_text('["fox/acc"]\nmin = "200%"\n')
    command = [
        sys.executable, "-c", QSERVE, site, "eval", tiny_packed, "--against", tiny_model, "--tasks", "fox,read,write",
        "--tasks-dir", tmp_path, "--json", report, "--html", tmp_path / "r.html", "--gate", gate,
    ]  # fmt: skip
    done = judge(command)
    assert done.returncode == 3, done.stderr[-4000:]
    assert "gate failed: fox/acc" in done.stderr
    found = {each["model"]["task"]: each for each in json.loads(report.read_text())["data"]["results"]}
    assert found.keys() == TASKS.keys()
    for side, path in (("base", tiny_model), ("model", tiny_packed)):
        answers = Answers(Engine(open_model(path), EngineConfig(max_num_seqs=4)))
        right, nats, size = [], 0.0, 0
        for question, choices in DOCUMENTS:
            values = [answers.loglikelihood(question, f" {choice}")[0] for choice in choices]
            right.append(float(values[0] == max(values)))
            nats -= answers.rolling(question)
            size += len(question.encode())
        assert tuple(found["fox"][side]["documents"]) == tuple(right)
        assert found["fox"][side]["value"] == pytest.approx(sum(right) / len(right))
        assert found["read"][side]["value"] == pytest.approx(2.718281828459045 ** (nats / size), rel=1e-6)
        assert found["write"][side]["value"] == 0.0
    missing = judge([*command[:5], tiny_packed, "--tasks", "nothing_at_all", "--tasks-dir", tmp_path])
    assert missing.returncode == 2 and "no task nothing_at_all" in missing.stderr, missing.stderr[-2000:]
