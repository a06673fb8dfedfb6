"""KV blocks beside the cache: the slots of memory, the blobs on disk, and the thread between them."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.kernels.ranks import RankLost
from qserve.runtime.block_files import BlockFiles
from qserve.runtime.block_store import BlockStore
from qserve.runtime.block_tiers import BlockTiers, Key, Outcome, Rates, Transfer
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

BYTES = 48
BLOB = BYTES + 51
NAME = "a" * 64


def key(number: int, group: int = 0) -> Key:
    return group, number.to_bytes(32, "big")


def content(which: Key) -> bytes:
    return Random(repr(which)).randbytes(BYTES)


def put(files: BlockFiles, which: Key) -> tuple[Key, ...]:
    done, dropped = files.write(which, memoryview(content(which)))
    assert done
    files.check()
    return dropped


def got(files: BlockFiles, which: Key) -> bytes | None:
    block = bytearray(BYTES)
    return bytes(block) if files.read(which, memoryview(block)) else None


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BlockFiles]:
    found = BlockFiles(tmp_path / "kv", 10 * BLOB, NAME, BYTES)
    yield found
    found.close()


def reopened(files: BlockFiles, name: str = NAME, blobs: int = 10) -> BlockFiles:
    files.close()
    return BlockFiles(files._own.parent, blobs * BLOB, name, BYTES)


def test_what_was_written_is_read_after_a_restart_too(files: BlockFiles) -> None:
    written = [key(n, group) for n in range(3) for group in range(2)]
    for which in written:
        put(files, which)
    again = reopened(files)
    assert again.keys() == written, "in the order in which they were used"
    assert [got(again, which) for which in written] == [content(which) for which in written]
    again.close()


def test_the_least_recently_used_make_room_those_of_other_models_too(files: BlockFiles) -> None:
    for number in range(8):
        put(files, key(number))
        os.utime(files._path(key(number)), ns=(number, number))
    assert got(files, key(0)) == content(key(0))
    other = reopened(files, "b" * 64)
    assert other.keys() == [] and len(other._sizes) == 8
    assert [put(other, key(number)) for number in range(3)] == [(), (), ()], "none of its own keys"
    again = reopened(other)
    assert again.keys() == [*(key(number) for number in range(2, 8)), key(0)]
    less = reopened(again, blobs=4)
    less.check()
    assert less.nbytes == 4 * BLOB
    less.close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "renamed", "header"])
def test_what_is_damaged_is_not_used(files: BlockFiles, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        put(files, key(number))
    path = files._path(key(0))
    good = path.read_bytes()
    path.write_bytes({
        "flipped": good[:-5] + bytes([good[-5] ^ 1]) + good[-4:],
        "cut": good[:-1],
        "longer": good + b"x",
        "empty": b"",
        "renamed": files._path(key(1)).read_bytes(),
        "header": b"x" + good[1:],
    }[damage])
    with caplog.at_level(logging.WARNING):
        assert got(files, key(0)) is None
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert not path.exists() and got(files, key(1)) == content(key(1))


def test_what_a_kill_left_half_written_goes_and_other_files_stay(
    files: BlockFiles, caplog: pytest.LogCaptureFixture
) -> None:
    put(files, key(0))
    put(files, key(1))
    path = files._path(key(0))
    partial, foreign = path.with_name(f".{path.name}"), files._own / "notes.txt"
    partial.write_bytes(b"half")
    foreign.write_text("mine")
    path.write_bytes(path.read_bytes()[:9])
    with caplog.at_level(logging.WARNING):
        again = reopened(files)
    assert len(caplog.records) == 1 and "2 half-written KV blocks are deleted, 1 other files are ignored" in caplog.text
    assert again.keys() == [key(1)] and foreign.read_text() == "mine" and not partial.exists()
    again.close()


def test_a_disk_that_takes_nothing_costs_one_line(files: BlockFiles, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(files._own)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert files.write(key(number), memoryview(content(key(number)))) == (False, ())
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text
    files._own.mkdir()
    put(files, key(0))


def test_a_directory_is_refused_early(files: BlockFiles, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in use by another process"):
        BlockFiles(files._own.parent, 10 * BLOB, NAME, BYTES)
    with pytest.raises(UsageError, match="--kv-offload-dir-size 9 holds no KV block"):
        BlockFiles(tmp_path, 9, NAME, BYTES)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        BlockFiles(tmp_path / "file", 10 * BLOB, NAME, BYTES)


def test_blobs_are_for_their_owner_alone(files: BlockFiles) -> None:
    put(files, key(0))
    assert files._path(key(0)).stat().st_mode & 0o777 == 0o600 and files._own.stat().st_mode & 0o777 == 0o700
    assert files.probe() > 0


def test_a_slot_is_not_taken_from_what_is_written_or_planned() -> None:
    tiers = BlockTiers(4, on_disk=[key(9)])
    slots = [tiers.store(key(number)) for number in range(4)]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2, 3]
    assert [order.key for order in tiers.orders()] == [key(0), key(1)], "half of the slots may wait for the disk"
    assert tiers.store(key(2)) is None, "it is there"
    tiers.load(key(3))
    assert tiers.store(key(4)) == slots[2], "the others are written, or planned"
    assert tiers.load(key(4)) == slots[2]
    assert tiers.store(key(5)) is None and not tiers.fetch(key(9))
    tiers.planned()
    tiers.finish(Outcome(Transfer(key(0), slots[0] or 0, True), True))
    assert tiers.fetch(key(9)) and tiers.is_reading(key(9)) and not tiers.in_memory(key(0))
    tiers.check()
    tiers.clear()
    tiers.check()
    assert tiers.num_filled == 0 and tiers.is_on_disk(key(0)) and tiers.num_reading == 0


def test_a_block_comes_back_where_that_is_sooner_than_computing_it() -> None:
    tiers = BlockTiers(4, on_disk=[key(1)], rates=Rates(memory=1.0, disk=4.0))
    tiers.store(key(0))
    assert tiers.in_memory(key(0)) and tiers.in_reach(key(1)), "nothing was computed yet"
    tiers.computed(3.0)
    assert tiers.in_memory(key(0)) and tiers.in_reach(key(0)) and not tiers.in_reach(key(1))
    for _ in range(99):
        tiers.computed(0.5)
    assert not tiers.in_memory(key(0)) and not tiers.in_reach(key(0))


def drive(directory: Path, steps: int, seed: int) -> int:
    """Random stores, fetches, damage and kills. Whatever is found is what was stored. Returns how much was found."""
    random, found, count, limit = Random(seed), 0, 6, 12 * BLOB
    store, tiers, slots = _start(directory, count, limit)
    for _ in range(steps):
        for outcome in store.outcomes(0.002 if random.random() < 0.2 else 0.0):
            tiers.finish(outcome)
            if outcome.done and not outcome.transfer.to_disk:
                found += 1
                assert _held(slots, outcome.transfer)
        which, action = key(random.randrange(9), random.randrange(2)), random.random()
        if action < 0.5:
            if (slot := tiers.store(which)) is not None:
                slots[slot] = torch.frombuffer(bytearray(content(which)), dtype=torch.uint8)
        elif action < 0.9:
            if tiers.in_memory(which):
                found += 1
                assert _held(slots, Transfer(which, tiers.load(which), False))
                tiers.planned()
            elif not tiers.is_reading(which) and tiers.in_reach(which) and tiers.room:
                tiers.fetch(which)
        elif action < 0.99:
            blobs = sorted(directory.glob("*/*.kv"))
            if blobs:
                _damage(random.choice(blobs), random)
        else:
            killed, directory = directory, directory.with_name(f"{directory.name}x")
            _copy(killed, directory)  # in the middle of its work
            store.close()
            shutil.rmtree(killed)
            store, tiers, slots = _start(directory, count, limit)
        store.begin(tiers.orders())
        tiers.check()
    store.close()
    return found


def _start(directory: Path, count: int, limit: int) -> tuple[BlockStore, BlockTiers, Tensor]:
    files = BlockFiles(directory, limit, NAME, BYTES)
    slots = torch.zeros(count, BYTES, dtype=torch.uint8)
    return BlockStore(slots, files), BlockTiers(count, files.keys()), slots


def _copy(directory: Path, copy: Path) -> None:
    """The blobs as they are at this moment, the half-written ones too."""
    for path in [*directory.glob("*/*"), *directory.glob("*/.*")]:
        (copy / path.parent.name).mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # it has just made room, or got its name
            shutil.copy2(path, copy / path.parent.name / path.name)


def _held(slots: Tensor, transfer: Transfer) -> bool:
    return bytes(slots[transfer.slot].tolist()) == content(transfer.key)


def _damage(path: Path, random: Random) -> None:
    with suppress(FileNotFoundError):  # it has just made room
        whole = bytearray(path.read_bytes())
        if random.random() < 0.3:
            path.unlink()
        elif random.random() < 0.5 or not whole:
            path.write_bytes(whole[: random.randrange(len(whole) + 1)])
        else:
            whole[random.randrange(len(whole))] ^= 1 << random.randrange(8)
            path.write_bytes(whole)


def test_random_stores_damage_and_kills(tmp_path: Path) -> None:
    assert drive(tmp_path / "kv", 1000, 1) > 50


@pytest.mark.slow
def test_ten_thousand_random_stores_damage_and_kills(tmp_path: Path) -> None:
    assert sum(drive(tmp_path / f"kv{seed}", 2500, seed) for seed in range(4)) > 500


PROMPTS = [[(i * 7 + j * 3) % 300 + 5 for i in range(100)] for j in range(5)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, logprobs=1)
CACHE = 17 * 16 * 2 * 2 * 2 * 16 * 2  # 17 blocks: two prompts and a half


def answers(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """For each prompt its tokens with their log-probabilities; and the prompt tokens that were not computed."""
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    for output in engine.generate(list(prompts), [PARAMS] * len(prompts)):
        engine.check()
        index = int(output.request_id)
        found[index] += [(each.chosen.token_id, each.chosen.logprob) for each in output.logprobs or ()]
        cached[index] = max(cached[index], output.cached_tokens)
    return found, cached


def tiered(model: Path, **options: object) -> Engine:
    config = EngineConfig(**{"max_model_len": 256, "threads": 1, "kv_cache_memory": CACHE, **options})  # type: ignore[arg-type]
    engine = Engine(str(model), config)
    if config.num_ranks > 1:  # where they wait for a processor, to copy a block seems to take longer than to compute it
        assert engine.offload is not None
        engine.offload.tiers.rates = Rates()
    return engine


@pytest.mark.parametrize("ranks", [
    {}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_what_came_back_has_the_bits_that_were_computed(
    tiny_model: Path, tmp_path: Path, ranks: dict[str, int]
) -> None:
    """With several ranks each copies its part of a block, and a file has all of them."""
    want, _ = answers(Engine(str(tiny_model), EngineConfig(max_model_len=256, threads=1)), PROMPTS)
    folder = str(tmp_path / "kv")
    with_disk = tiered(tiny_model, kv_offload_memory=1 << 20, kv_offload_dir=folder, **ranks)
    for round in range(2):
        got, cached = answers(with_disk, PROMPTS)  # at once: they preempt each other
        assert got == want
        assert round == 0 or all(count == 96 for count in cached)
    stats = with_disk.stats()
    assert stats.offload is not None and stats.offload.loaded > 20 and stats.num_preemptions > 0
    assert "evicted blocks" in "".join(with_disk.memory.lines())
    if not ranks:
        with pytest.raises(UsageError, match="in use"):
            tiered(tiny_model, kv_offload_dir=folder)
    with_disk.close()

    restarted = tiered(tiny_model, kv_offload_memory=1 << 20, kv_offload_dir=folder, **ranks)
    assert answers(restarted, PROMPTS[:2]) == (want[:2], [96, 96])
    use = restarted.stats().offload
    assert use is not None and use.read >= 12 and use.failed == 0
    restarted.close()
    if ranks:
        return

    other_dtype = tiered(tiny_model, kv_offload_dir=folder, kv_cache_dtype="bf16", **ranks)
    assert answers(other_dtype, PROMPTS[:1])[1] == [0], "other bits lie under another name"
    other_dtype.close()

    for path in (tmp_path / "kv").glob("*/*.kv"):
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
    damaged = tiered(tiny_model, kv_offload_dir=folder, **ranks)
    assert answers(damaged, PROMPTS[:1]) == (want[:1], [0])
    use = damaged.stats().offload
    assert use is not None and use.failed == 6
    damaged.close()


@pytest.mark.slow
def test_a_rank_that_dies_writes_nothing_more(tiny_model: Path, tmp_path: Path) -> None:
    folder, ranks = str(tmp_path / "kv"), {"tensor_parallel_size": 2}
    engine = tiered(tiny_model, kv_offload_memory=1 << 20, kv_offload_dir=folder, **ranks)
    answers(engine, PROMPTS[:1])
    assert engine._ranks is not None
    os.kill(engine._ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankLost):
        answers(engine, PROMPTS[:1])
    engine.close()
    assert not [*(tmp_path / "kv").glob("*/*.kv")]
    again = tiered(tiny_model, kv_offload_dir=folder, **ranks)
    assert answers(again, PROMPTS[:1])[1] == [0]
    again.close()
    assert [*(tmp_path / "kv").glob("*/*.kv")]


def test_another_tenant_finds_nothing(tiny_model: Path) -> None:
    engine = tiered(tiny_model, kv_offload_memory=1 << 20)

    def cached(prompt: list[int], salt: str) -> int:
        engine.submit("a", prompt, PARAMS, cache_salt=salt)
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        return max(output.cached_tokens for output in outputs)

    for prompt in PROMPTS:
        assert cached(prompt, "one") == 0
    assert cached(PROMPTS[0], "two") == 0 and cached(PROMPTS[0], "one") == 96


def test_after_a_failed_step_nothing_is_found(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiered(tiny_model, kv_offload_memory=1 << 20)
    want, _ = answers(engine, PROMPTS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.decoder, "run", lambda *steps: 1 / 0)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            answers(engine, PROMPTS[:1])
    engine.check()
    assert engine.scheduler.blocks.num_cached == 0
    assert answers(engine, PROMPTS[:1]) == (want[:1], [0])


@pytest.mark.slow
def test_what_a_failed_step_of_a_pipeline_would_have_written_is_not_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_offload_memory": 1 << 20, "kv_offload_dir": str(tmp_path / "kv"), "pipeline_parallel_size": 2}
    engine = tiered(tiny_model, **options)
    want, _ = answers(engine, PROMPTS)
    read_out, calls = engine.runner._read_out, iter(range(1000))  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        fails = lambda *args: 1 / 0 if next(calls) == 9 else read_out(*args)  # noqa: E731
        patch.setattr(engine.runner, "_read_out", fails)
        with pytest.raises(ZeroDivisionError):
            answers(engine, PROMPTS[::-1])
    engine.check()
    assert answers(engine, PROMPTS)[0] == want
    engine.close()
    again = tiered(tiny_model, **options)
    assert answers(again, PROMPTS)[0] == want
    again.close()


def test_wishes_that_cannot_be_met_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave out --no-prefix-caching"):
        EngineConfig(kv_offload_memory=1 << 20, enable_prefix_caching=False)
    with pytest.raises(CapacityError, match="--kv-offload-memory 100 holds no KV block"):
        tiered(tiny_model, kv_offload_memory=100)
    with pytest.raises(CapacityError, match="of memory that is left; lower it"):
        tiered(tiny_model, kv_offload_memory=1 << 50)
    with pytest.raises(UsageError, match="holds no KV block"):
        tiered(tiny_model, kv_offload_dir=str(tmp_path), kv_offload_dir_size=10)
