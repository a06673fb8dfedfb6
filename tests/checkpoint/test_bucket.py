"""Checkpoints in buckets, from a real S3 server on this machine: checked, complete or not there, bounded, shared."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qserve.checkpoint import bucket
from qserve.checkpoint.bucket import cached, fetch_bucket, is_bucket_url
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.manifest import write_manifest
from qserve.checkpoint.source import open_model
from qserve.checkpoint.store import find_models

moto_server = pytest.importorskip("moto.server", reason="moto is not installed")
boto3 = pytest.importorskip("boto3")
pytest.importorskip("s3fs", reason="s3fs is not installed")


@pytest.fixture(scope="module")
def address(plain_http: None) -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the server, with an empty bucket; the cache of this test is its own."""
    for name, value in {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1", "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    for entry in client.list_objects_v2(Bucket="models").get("Contents", ()):
        client.delete_object(Bucket="models", Key=entry["Key"])
    return client


@pytest.fixture
def checkpoint(tiny_packed: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    shutil.copytree(tiny_packed, path)
    write_manifest(path)
    return path


def put(s3: Any, path: Path, prefix: str = "tiny/v1", without: str = "") -> str:
    for file in path.iterdir():
        if file.name != without:
            s3.upload_file(str(file), "models", f"{prefix}/{file.name}")
    return f"s3://models/{prefix}"


def partials(home: Path) -> list[Path]:
    return [*home.glob("cache/qserve/buckets/.*partial*")]


def test_which_texts_are_urls_of_buckets() -> None:
    assert all(map(is_bucket_url, ("s3://a/b", "gs://a", "s3://models/llama/v1/")))
    assert not any(map(is_bucket_url, ("s3://", "s3:/a", "http://a/b", "org/name", "s3")))


def test_a_checkpoint_is_fetched_once_and_checked(s3: Any, checkpoint: Path, tmp_path: Path) -> None:
    url = put(s3, checkpoint)
    counts: list[tuple[int, int]] = []
    first = fetch_bucket(url, lambda done, total: counts.append((done, total)))
    assert first.came == first.bytes and counts[-1] == (first.bytes, first.bytes)
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == {
        file.name: file.read_bytes() for file in checkpoint.iterdir()
    }
    again = fetch_bucket(f"{url}/")
    assert (again.path, again.came) == (first.path, 0)
    source = open_model(url)
    source.verify()
    assert source.name == "v1" and source.sha256() == open_model(checkpoint).sha256()
    assert open_model(url, offline=True).path == first.path
    assert [(url, first.path)] == [*cached()] and not partials(tmp_path)
    found = {model.name: model for model in find_models([])}
    assert found[url].path == first.path and found[url].problem is None
    other = put(s3, checkpoint, "other")
    assert fetch_bucket(other).came == 0, "equal checkpoints are kept once"


def test_what_changes_in_the_bucket_is_another_copy(s3: Any, checkpoint: Path) -> None:
    url = put(s3, checkpoint)
    first = fetch_bucket(url).path
    (checkpoint / "generation_config.json").write_text('{"top_k": 7}')
    write_manifest(checkpoint)
    put(s3, checkpoint)
    second = fetch_bucket(url).path
    assert second != first and first.is_dir(), "whoever has opened the first goes on with it"
    assert open_model(url, offline=True).generation_config()["top_k"] == 7


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s3: s3.delete_object(Bucket="models", Key="tiny/v1/manifest.json"), "holds no manifest.json"),
        (lambda s3: s3.put_object(Bucket="models", Key="tiny/v1/config.json", Body=b"{}"), "differs from its hash"),
        (lambda s3: s3.put_object(Bucket="models", Key="tiny/v1/config.json", Body=b"x" * 99_999), "differs from its"),
        (lambda s3: s3.put_object(Bucket="models", Key="tiny/v1/manifest.json", Body=b"{"), "is no valid JSON"),
        (
            lambda s3: s3.put_object(
                Bucket="models", Key="tiny/v1/manifest.json",
                Body=b'{"files": {"../../x.json": {"bytes": 1, "sha256": "a"}}}',
            ),
            "is no file of a checkpoint",
        ),
        (
            lambda s3: s3.put_object(
                Bucket="models", Key="tiny/v1/manifest.json", Body=b'{"files": {"a.py": {"bytes": 1, "sha256": "a"}}}'
            ),
            "is no file of a checkpoint",
        ),
    ],
)  # fmt: skip
def test_what_is_not_right_is_one_line_and_no_copy(
    s3: Any, checkpoint: Path, tmp_path: Path, spoil: Any, words: str
) -> None:
    url = put(s3, checkpoint)
    spoil(s3)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_model(url)
    assert "\n" not in str(caught.value) and url in str(caught.value) and not [*cached()]
    put(s3, checkpoint)
    assert open_model(url).name == "v1" and not partials(tmp_path)


def test_a_fetch_that_was_interrupted_goes_on(s3: Any, checkpoint: Path, tmp_path: Path) -> None:
    url = put(s3, checkpoint)
    last = max(file.name for file in checkpoint.iterdir() if file.name not in ("manifest.json", "quality_card.json"))
    s3.delete_object(Bucket="models", Key=f"tiny/v1/{last}")
    with pytest.raises(CheckpointError, match="is incomplete"):
        fetch_bucket(url)
    assert partials(tmp_path)
    put(s3, checkpoint)
    assert fetch_bucket(url).came == (checkpoint / last).stat().st_size


@pytest.mark.slow
def test_other_failures_are_one_line(s3: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="holds no manifest"):
        open_model("s3://no-such-bucket/x")
    with pytest.raises(CheckpointError, match="is not in the cache"):
        open_model("s3://models/unknown", offline=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        open_model("s3://models/x")


@pytest.mark.slow
def test_the_cache_has_a_bound_and_keeps_what_is_in_use(
    s3: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = fetch_bucket(put(s3, checkpoint, "a")).bytes
    program = "import sys; from qserve.checkpoint.bucket import fetch_bucket; fetch_bucket(sys.argv[1])"
    old = []
    for name in ("b", "c"):  # opened by processes that have ended
        (checkpoint / "generation_config.json").write_text(f'{{"top_k": {ord(name)}}}')
        write_manifest(checkpoint)
        subprocess.run([sys.executable, "-c", program, put(s3, checkpoint, name)], check=True)
        old.append(dict(cached())[f"s3://models/{name}"])
    used = dict(cached())["s3://models/a"]
    free = shutil.disk_usage(checkpoint)._replace(free=size)
    monkeypatch.setattr(bucket.shutil, "disk_usage", lambda path: free)
    (checkpoint / "generation_config.json").write_text('{"top_k": 9}')
    write_manifest(checkpoint)
    new = fetch_bucket(put(s3, checkpoint, "d")).path
    assert new.is_dir() and used.is_dir() and not old[0].exists() and old[1].is_dir()
    monkeypatch.setattr(bucket, "CACHE_SHARE", 0.1)
    (checkpoint / "generation_config.json").write_text('{"top_k": 10}')
    write_manifest(checkpoint)
    with pytest.raises(CheckpointError, match="no room for s3://models/e"):
        fetch_bucket(put(s3, checkpoint, "e"))
    assert used.is_dir() and new.is_dir()
