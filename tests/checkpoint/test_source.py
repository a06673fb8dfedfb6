from __future__ import annotations

import pytest

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hub import is_hub_id
from qserve.checkpoint.source import open_model


@pytest.mark.parametrize(
    "text, expected",
    [
        ("org/name", True),
        ("gpt2", True),
        ("meta-llama/Llama-3.2-1B", True),
        ("a/b/c", False),
        ("../x", False),
        ("/abs/path", False),
        ("./rel", False),
        ("a--b/c", False),
        ("", False),
        ("org/", False),
        ("x y", False),
    ],
)
def test_hub_ids(text, expected) -> None:
    assert is_hub_id(text) is expected


def test_a_hub_id_that_is_not_cached_offline(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="is not in the hub cache") as caught:
        open_model("no-such-organization/no-such-model", offline=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "a/b/c/d", "absent.gguf", "~/absent/model"])
def test_paths_that_do_not_exist(model) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist|cannot be read") as caught:
        open_model(model, offline=True)
    assert "absent" in str(caught.value) or "a/b/c/d" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_named_demo_wins_over_the_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_model("demo")
