"""Unfinished checkpoints: what is kept, what is redone, and that a kill at any moment changes no byte."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sized
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qserve.checkpoint.errors import CheckpointError, GateFailed
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.staging import Facts, fingerprint
from qserve.checkpoint.writer import CheckpointWriter

BLOCKS = 4
MINE = {"name": "mine", "threads": "2"}


def block(number: int) -> dict[str, torch.Tensor]:
    codes = torch.arange(301, dtype=torch.uint8) * (number + 3)
    return {f"{number}.codes": codes, f"{number}.scales": torch.full((7, 3), 0.1 * number, dtype=torch.bfloat16)}


def job(out: Path, committed: Callable[[int], object] = lambda number: None, *, facts: Facts | None = MINE,
        stop: BaseException | None = None, blocks: int = BLOCKS, overwrite: bool = False) -> int:
    """Writes ``blocks`` blocks, raises ``stop`` before the last, and returns how many it did not have to redo."""
    with CheckpointWriter(out, facts=facts, shard_bytes=800, overwrite=overwrite) as writer:
        for number in range(blocks):
            if f"block {number}" in writer.committed():
                tensors, extra = writer.part(f"block {number}")
                assert extra == {"loss": number / 3}
                assert all(torch.equal(tensors[name], tensor) for name, tensor in block(number).items())
                continue
            key = f"block {number}"
            if half := writer.kept(key):
                assert half.extra == {"half": number} and torch.equal(half.read("half"), torch.full((3,), number))
            writer.keep(key, [("half", torch.full((3,), number))], {"half": number})
            for name, tensor in block(number).items():
                writer.put(name, tensor)
            if stop is not None and number == blocks - 1:
                raise stop
            writer.commit(f"block {number}", {"loss": number / 3})
            committed(number + 1)
        writer.put("norm", torch.ones(5))
        writer.put_json("config.json", {"model_type": "llama", "blocks": blocks})
        writer.finish()
    return writer.resumed


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def staging(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"


def work(out: Path, facts: Facts = MINE) -> Path:
    return staging(out) / fingerprint(facts)[:12]


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    (tmp_path / "reference").mkdir()
    job(tmp_path / "reference" / "out")
    return content(tmp_path / "reference" / "out")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "out"


@pytest.mark.parametrize("stop", [
    KeyboardInterrupt(), SystemExit(1), MemoryError(), RuntimeError("a defect"), CheckpointError("no space left"),
], ids=lambda stop: type(stop).__name__)
def test_an_interrupted_job_goes_on(out: Path, expected: dict[str, bytes], stop: BaseException) -> None:
    with pytest.raises(type(stop)) as caught:
        job(out, stop=stop)
    assert caught.value.__notes__[-1] == f"what is done is kept in {work(out)}: run the same command again to go on"
    parts = sorted(path.name for path in (work(out) / "parts").iterdir())
    assert parts == [*(f"{number:05d}" for number in range(1, BLOCKS)), f"{BLOCKS:05d}.state"]
    assert job(out) == BLOCKS - 1
    assert content(out) == expected and os.listdir(out.parent) == ["out"]


def test_without_a_fingerprint_or_a_commit_nothing_is_kept(out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        job(out, facts=None, stop=KeyboardInterrupt())
    assert os.listdir(out.parent) == []
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(out, facts=MINE) as writer:
        writer.put("a", torch.zeros(4))
        raise KeyboardInterrupt
    assert os.listdir(out.parent) == []


def test_what_was_kept_last_of_unfinished_work_is_found_until_the_next_commit(out: Path) -> None:
    def parts() -> list[str]:
        return sorted(path.name for path in (work(out) / "parts").iterdir())

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CheckpointWriter(out, facts=MINE) as writer:
        assert writer.kept("first") is None
        for number in range(2):
            writer.keep("first", [("a", torch.full((2,), number)), ("b", torch.tensor(0.5))], {"loss": number / 3})
        assert parts() == ["00001.state"]
        writer.keep("first", failing(), {})  # what was kept before is there until this would be
    with CheckpointWriter(out, facts=MINE) as writer:
        state = writer.kept("first")
        assert writer.kept("second") is None and writer.committed() == [] and parts() == ["00001.state"]
        assert state is not None and state.extra == {"loss": 1 / 3}
        assert state.read("a").tolist() == [1, 1] and float(state.read("b")) == 0.5
        found = (work(out) / "parts" / "00001.state").read_bytes()
        writer.put("c", torch.ones(2))
        writer.commit("first")
        assert parts() == ["00001"] and writer.kept("first") is None
        (work(out) / "parts" / "00001.state").write_bytes(found)  # as if it was killed in between
        writer.keep("second", [("a", torch.zeros(2))], {})
    (work(out) / "parts" / "00002.state").write_bytes(found)  # of the same job, but of earlier work
    with CheckpointWriter(out, facts=MINE) as writer:
        assert parts() == ["00001"] and writer.kept("first") is writer.kept("second") is None
        writer.finish()
    assert load_file(out / "model.safetensors").keys() == {"c"} and os.listdir(out.parent) == ["out"]


@pytest.mark.usefixtures("fast")
def test_a_job_that_begins_again_is_the_old_one_or_the_new_one_whenever_it_is_killed(out: Path) -> None:
    def attempts() -> None:
        with CheckpointWriter(out, facts=MINE) as writer:
            if not writer.committed():
                writer.commit("plan", {"attempt": 1})
            if writer.part("plan")[1] == {"attempt": 1}:
                if "block 0" not in writer.committed():
                    writer.put("0", torch.zeros(3))
                    writer.commit("block 0")
                writer.seal()
                writer.restart("plan", {"attempt": 2})
                assert os.listdir(work(out) / "parts") == ["00001"] and not os.listdir(writer.directory)
            if "block 0" not in writer.committed():
                writer.put("0", torch.ones(3))
                writer.commit("block 0")
            writer.finish()

    seen = set()
    for _ in killed_at_every_step(out, attempts):
        if not out.exists():
            with CheckpointWriter(out, facts=MINE) as writer:
                attempt = writer.part("plan")[1]["attempt"] if writer.committed() else 0
                seen.add((attempt, len(writer.committed())))
            attempts()
        found = load_file(out / "model.safetensors")
        assert found.keys() == {"0"} and found["0"].tolist() == [1, 1, 1]
    assert seen == {(0, 0), (1, 1), (1, 2), (2, 1), (2, 2)}


def test_what_fails_its_gates_is_kept_but_not_published(out: Path) -> None:
    def gated(passes: bool) -> None:
        with CheckpointWriter(out, facts=MINE) as writer:
            if "a" not in writer.committed():
                writer.put("a", torch.zeros(4))
                writer.commit("a")
            writer.seal()
            if not passes:
                raise GateFailed("too far from the base")
            writer.finish()

    for _ in range(2):  # the same command again publishes nothing either
        with pytest.raises(GateFailed) as failed:
            gated(passes=False)
        note = failed.value.__notes__[-1]
        assert note == f"{out} is not published; what was made is kept in {work(out)}"
        assert not out.exists() and not any((work(out) / "checkpoint").iterdir())
    with CheckpointWriter(out, facts=MINE) as writer:
        assert writer.committed() == ["a"]
    gated(passes=True)
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("other", [{"name": "mine", "threads": "8"}, {"name": "another"}], ids=str)
def test_another_job_leaves_unfinished_work_alone_and_names_it(
    out: Path, expected: dict[str, bytes], other: Facts
) -> None:
    with pytest.raises(KeyboardInterrupt):
        job(out, stop=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        job(out, facts=other, stop=KeyboardInterrupt())
    with CheckpointWriter(out, facts=other) as writer:
        assert writer.resumed == BLOCKS - 1
        (found,) = writer.others()
    assert found.path == work(out) and found.nbytes > 301 * (BLOCKS - 1)
    assert found.differs == (("threads",) if "threads" in other else ("name", "threads"))
    assert f"with other {', '.join(found.differs)} is kept in {work(out)}" in str(found)
    assert job(out, facts=other) == BLOCKS - 1
    assert content(out) == expected and os.listdir(staging(out)).count(work(out).name) == 1
    shutil.rmtree(out)
    assert job(out) == BLOCKS - 1
    assert content(out) == expected and os.listdir(out.parent) == ["out"]


def test_work_without_facts_is_never_resumed_and_leaves_nothing(out: Path, expected: dict[str, bytes]) -> None:
    (staging(out) / "unnamed" / "checkpoint").mkdir(parents=True)  # as a kill would leave it
    assert job(out, facts=None) == 0
    assert content(out) == expected and os.listdir(out.parent) == ["out"]


@pytest.mark.usefixtures("fast")
def test_a_job_goes_back_to_the_attempt_that_passed_whenever_it_is_killed(out: Path) -> None:
    def attempts() -> None:
        with CheckpointWriter(out, facts=MINE) as writer:
            if not writer.committed():
                writer.commit("plan", {"attempt": 1})
            while True:
                attempt = writer.part("plan")[1]["attempt"]
                if "block 0" not in writer.committed():
                    writer.put("0", torch.full((3,), attempt))
                    writer.commit("block 0")
                writer.put("norm", torch.full((2,), attempt))
                writer.seal()
                if "last" in writer.committed():
                    break
                if attempt == 1:
                    writer.restart("plan", {"attempt": 2}, set_aside=True)
                else:
                    writer.go_back()
                    writer.commit("last")
            writer.finish()

    steps = 0
    for _ in killed_at_every_step(out, attempts):
        if not out.exists():
            attempts()
        found = load_file(out / "model.safetensors")
        assert {name: tensor.tolist() for name, tensor in found.items()} == {"0": [1, 1, 1], "norm": [1, 1]}
        steps += 1
    assert steps > 30


def test_what_was_put_after_the_last_commit_is_put_again(out: Path, expected: dict[str, bytes]) -> None:
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(out, facts=MINE) as writer:
        for name, tensor in block(0).items():
            writer.put(name, tensor)
        writer.commit("block 0", {"loss": 0.0})
        writer.put("norm", torch.zeros(5))
        writer.seal()
        raise KeyboardInterrupt  # while the checkpoint is measured, say
    assert not any((work(out) / "checkpoint").iterdir())
    assert job(out) == 1
    assert content(out) == expected


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_part_and_those_after_it_are_redone(out: Path, expected: dict[str, bytes], damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        job(out, stop=KeyboardInterrupt())
    path = work(out) / "parts" / "00002"
    found = bytearray(path.read_bytes())
    found[40] ^= 4
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(found if damage == "flip" else found[:-9])
    assert job(out) == 1
    assert content(out) == expected


def test_a_part_damaged_while_the_job_runs_is_an_error(out: Path) -> None:
    with CheckpointWriter(out, facts=MINE) as writer:
        writer.put("a", torch.zeros(400))
        writer.commit("a")
        path = work(out) / "parts" / "00001"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="damaged; run the command again"):
            writer.part("a")


def test_names_and_keys_are_unique_over_interruptions(out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        job(out, stop=KeyboardInterrupt())
    with CheckpointWriter(out, facts=MINE) as writer:
        with pytest.raises(CheckpointError, match="twice"):
            writer.put("0.codes", torch.zeros(1))
        with pytest.raises(ValueError, match="twice"):
            writer.commit("block 0")
        writer.seal()
        with pytest.raises(ValueError, match="sealed"):
            writer.put("late", torch.zeros(1))


def test_one_process_at_a_time(out: Path, expected: dict[str, bytes]) -> None:
    script = textwrap.dedent(f"""
        import sys, time, torch
        from qserve.checkpoint.writer import CheckpointWriter
        with CheckpointWriter({str(out)!r}, facts={{"name": "other"}}) as writer:
            writer.put("a", torch.zeros(4))
            writer.commit("a")
            print("ready", flush=True)
            time.sleep(600)
    """)
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        with pytest.raises(CheckpointError, match="another process is writing") as caught:
            job(out)
        assert "\n" not in str(caught.value) and (work(out, {"name": "other"}) / "parts" / "00001").exists()
    finally:
        holder.kill()
        holder.wait()
    assert job(out) == 0  # a killed holder does not block
    assert content(out) == expected


def test_no_space_keeps_what_is_done(out: Path, expected: dict[str, bytes]) -> None:
    """A real failing disk: after two blocks the process may not write files beyond 100 bytes."""
    def fill(number: int) -> None:
        if number == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    def child() -> None:
        with pytest.raises(CheckpointError, match="no space left to write"):
            job(out, fill)

    assert os.waitpid(forked(child), 0)[1] == 0
    assert job(out) == 2
    assert content(out) == expected


def test_space_that_is_taken_by_kept_parts_counts_as_there(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        job(out, stop=KeyboardInterrupt())
    parts = sum(path.stat().st_size for path in work(out).rglob("*") if path.is_file())
    usage = type("Usage", (), {"free": 10_000})
    monkeypatch.setattr("qserve.checkpoint.writer.shutil.disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="no space left"):
        CheckpointWriter(out, facts=MINE, expected_bytes=(10_000 + parts) // 2 + 1)
    with CheckpointWriter(out, facts=MINE, expected_bytes=(10_000 + parts) // 2) as writer:
        assert writer.resumed == BLOCKS - 1
    kept = 10_000 + parts - 100
    with pytest.raises(CheckpointError, match="the checkpoint, and what a run goes on from after a kill"):
        CheckpointWriter(out, facts=MINE, expected_bytes=100, kept_bytes=kept + 1)
    with CheckpointWriter(out, facts=MINE, expected_bytes=100, kept_bytes=kept) as writer:
        assert writer.resumed == BLOCKS - 1


def forked(action: Callable[[], object]) -> int:
    """Runs ``action`` in a child, whose exit status is 0 where it returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def killed_at_every_step(out: Path, action: Callable[[], object], told: Sized = ()) -> Iterator[int]:
    """Runs ``action`` once, then lays down what it would have left beside ``out`` had it been killed, at each of its
    calls that change the file system, and what it left at its end. Yields how much was ``told`` by then.

    What a killed process has written stays, so it leaves what a copy holds, and copies take a tenth of the time of
    processes. ``test_killed_at_random_moments`` kills some.
    """
    folder, moments, copying = out.parent, out.parent.with_name("moments"), False
    lengths: list[int] = []

    def keep() -> None:
        nonlocal copying
        copying = True
        shutil.copytree(folder, moments / str(len(lengths)))
        lengths.append(len(told))
        copying = False

    def kept(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **options: object) -> object:
            if not copying:
                keep()
            return call(*args, **options)
        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, kept(getattr(os, name)))
        action()
    keep()
    for moment, length in enumerate(lengths):
        shutil.rmtree(folder)
        (moments / str(moment)).rename(folder)
        yield length


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill is no loss of power: what was written stays, synced or not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_every_step(out: Path, expected: dict[str, bytes], overwrite: bool) -> None:
    """Whatever the step: no more than the block at hand is lost, an old checkpoint is never lost, and the next
    run gives the same bytes and leaves nothing else."""
    old: dict[str, bytes] | None = None
    if overwrite:
        job(out, facts={"name": "old"}, blocks=1)
        old = content(out)
    steps, told = 0, list[int]()
    for reported in killed_at_every_step(out, lambda: job(out, told.append, overwrite=overwrite), told):
        if not out.exists() or (overwrite and content(out) != expected):
            if old is not None:
                kept = out if out.exists() else staging(out) / "replaced"
                assert content(kept) == old
            resumed = job(out, overwrite=overwrite)
            assert resumed >= reported
        else:
            # It was complete: what is left beside it goes with the next run, even one that is refused.
            with pytest.raises(CheckpointError, match="--overwrite"):
                job(out)
        assert content(out) == expected and os.listdir(out.parent) == ["out"]
        steps += 1
    assert steps > 40


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(out: Path, expected: dict[str, bytes], seed: int) -> None:
    start = time.perf_counter()
    assert os.waitpid(forked(lambda: job(out.parent / "timing")), 0)[1] == 0
    duration = time.perf_counter() - start
    generator = random.Random(seed)
    kills = 0
    while not out.exists():
        pid = forked(lambda: job(out))
        time.sleep(generator.uniform(0.1, 1.0) * duration)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        kills += status != 0
        assert kills < 200
    assert content(out) == expected
    HFDirectory(out).verify()


@pytest.mark.usefixtures("fast")
def test_a_failing_disk_at_every_step(out: Path, expected: dict[str, bytes]) -> None:
    """An I/O error of any call that makes the result is one line, and the next run completes it."""
    for step in itertools.count():
        left = step

        def failing(call: Callable[..., object]) -> Callable[..., object]:
            def wrapped(*args: object, **options: object) -> object:
                nonlocal left
                left -= 1
                if left == -1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return call(*args, **options)
            return wrapped

        with pytest.MonkeyPatch.context() as patch:
            for name in ("rename", "replace", "fsync", "mkdir"):
                patch.setattr(os, name, failing(getattr(os, name)))
            try:
                job(out)
            except CheckpointError as error:
                assert str(error).endswith("cannot be written: Input/output error")
        if not out.exists():
            job(out)
        assert content(out) == expected and os.listdir(out.parent) == ["out"]
        shutil.rmtree(out)
        if left >= 0:
            break
    assert step > 30
