"""Configurations that were measured: files, the choice among candidates, the cache of ``--autotune``.

Times are made up instead of measured; products are computed by Triton's interpreter.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import triton

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels import ops, registry
from qserve.kernels.triton import linear, weight_only
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.target import DEFAULT, is_interpreted
from qserve.kernels.triton.tuning import autotune, tune, tuned
from qserve.kernels.triton.tuning.configs import BUCKETS, Config, bucket_of
from qserve.kernels.triton.tuning.stopwatch import Stopwatch, Time
from qserve.kernels.triton.tuning.tune import Tunable, Tuner, candidates
from qserve.kernels.triton.workspace import Workspace
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="a GPU is here: it is timed")

CPU = torch.device("cpu")
GOOD = Config(16, 64, 4, 3, splits=2)


@dataclass(frozen=True)
class Clock(Stopwatch):
    """Runs what it is to time, and reads the time off a list of configurations, most of which take a second."""

    products: Sequence[Tunable] = ()
    times: dict[Config, float] = field(default_factory=dict)
    timed: list[Config] = field(default_factory=list)

    def time(self, calls: Sequence[Callable[[], object]]) -> Time:
        for call in calls:
            call()
        config = self.products[0].configs[bucket_of(calls[0].args[0])]  # type: ignore[attr-defined]
        assert all(product.configs[bucket_of(calls[0].args[0])] == config for product in self.products)  # type: ignore[attr-defined]
        self.timed.append(config)
        return Time(self.times.get(config, 1.0), False)


def product(rows: int = 20, out: int = 128, inp: int = 256, *, invariant: bool = False, fp8: bool = False) -> Any:
    torch.manual_seed(out)
    scheme = WeightScheme(8, -1, dtype="fp8") if fp8 else WeightScheme(4, 128)
    codes = torch.randint(0, 16, (out, inp), dtype=torch.uint8) + (40 if fp8 else 0)
    weight = QuantizedWeight(scheme, codes, torch.full((out, scheme.groups(inp)), 0.01),
                             activations=ActivationScheme("fp8") if fp8 else None)  # fmt: skip
    x, y = torch.randn(rows, inp, dtype=torch.float16), torch.empty(rows, out, dtype=torch.float16)
    return linear.prepare(ops.Linear(x, weight, y), Workspace(CPU), invariant)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where measured configurations are shipped, empty."""
    monkeypatch.setattr(tuned, "DATA", tmp_path)
    tuned.in_use.cache_clear()
    yield tmp_path
    tuned.in_use.cache_clear()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the candidates, for the interpreter is slow."""
    monkeypatch.setattr(tune, "candidates", lambda product, rows: candidates(product, rows)[:6])


def ship(folder: Path, key: str, config: Config = GOOD, bucket: int = 16) -> Path:
    file = tuned.begin(DEFAULT, "a test")
    file.entries[key] = {bucket: tuned.Measured(config, 1.0, 2.0)}
    path = tuned.file_of(DEFAULT, folder)
    file.write(path)
    tuned.in_use.cache_clear()
    return path


@pytest.mark.parametrize("fp8", [False, True])
def test_the_fastest_that_is_right_is_chosen(few: None, fp8: bool) -> None:
    products = [product(fp8=fp8) for _ in range(2)]
    first = products[0]
    choices = tune.candidates(first, 16)
    default, fast, wrong = choices[0], choices[3], choices[5]
    clock = Clock(CPU, products=products, times={fast: 0.5, wrong: 0.1})
    run = type(first).run

    def spoiled(self: Any, rows: int) -> None:
        run(self, rows)
        if self.configs[16] == wrong:
            self.op.out[:rows, :64].zero_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(first), "run", spoiled)
        found = Tuner(clock).tune(products, 16)
    assert found == tuned.Measured(fast, 0.5e6, 1e6)
    assert [each.configs[16] for each in products] == [fast, fast]
    assert wrong not in clock.timed and clock.timed[-2:] == [default, fast]
    assert set(clock.timed) == set(choices) - {wrong}


def test_what_is_hardly_faster_is_not_worth_it_and_what_is_late_is_left(few: None) -> None:
    one = product()
    default = one.configs[32]
    other = candidates(one, 20)[1]
    assert Tuner(Clock(CPU, products=[one], times={other: 0.995})).tune([one], 32) == tuned.Measured(default, 1e6, 1e6)
    clock = Clock(CPU, products=[one])
    assert Tuner(clock, until=0.0).tune([one], 32) is None
    assert one.configs[32] == default and clock.timed == []


def test_a_shipped_file_is_what_products_go_by(data: Path) -> None:
    usual = product()
    assert "nothing was measured on none" in tuned.in_use(DEFAULT).lines()[0]
    path = ship(data, usual.key)
    chosen = product()
    assert chosen.configs == usual.configs | {16: GOOD} and usual.configs[16] != GOOD
    assert tuned.read(path, DEFAULT).count == 1 and path.name in tuned.in_use(DEFAULT).lines()[0]
    content = json.loads(path.read_text())
    assert content["command"] == "a test" and content["torch"] == torch.__version__
    path.write_text(json.dumps(content | {"kernels": "another"}))
    tuned.in_use.cache_clear()
    assert product().configs[16] == GOOD and "earlier version" in tuned.in_use(DEFAULT).lines()[0]


def test_what_was_measured_in_bfloat16_is_used_for_float16(data: Path) -> None:
    key = product().key
    assert " float16 " in key
    ship(data, key.replace("float16", "bfloat16"))
    assert product().configs[16] == GOOD
    ship(data, key, replace(GOOD, splits=1))
    assert product().configs[16] == replace(GOOD, splits=1), "its own come first"


def test_a_gpu_that_is_divided_alike_lends_its_file(data: Path) -> None:
    """The same GPU with another Triton comes first, then the newest; never one of another kind or size."""
    usual = product()

    def lend(name: str, date: str, splits: int, **changes: Any) -> None:
        file = tuned.begin(replace(DEFAULT, name=name, **changes), "a test")
        file.entries[usual.key] = {16: tuned.Measured(replace(GOOD, splits=splits), 1.0, 2.0)}
        replace(file, date=date).write(data / f"{name}.json")
        tuned.in_use.cache_clear()

    lend("smaller", "2030-01-01", 1, sms=78)
    lend("older", "2030-01-01", 1, architecture="sm_80")
    (data / "broken.json").write_text("{")
    assert product().configs == usual.configs and "nothing was measured" in tuned.in_use(DEFAULT).lines()[0]
    lend("GPU A", "2026-01-01", 2)
    assert product().configs[16] == GOOD
    lend("GPU B", "2026-01-02", 1)
    assert product().configs[16].splits == 1
    (line,) = tuned.in_use(DEFAULT).lines()
    assert line.startswith(f"1 measured on 2026-01-02, on GPU B with Triton {triton.__version__} (GPU B.json)")
    lend(DEFAULT.name, "2025-01-01", 2)
    assert product().configs[16] == GOOD and tuned.resume(data / "GPU A.json", DEFAULT, "again").entries == {}
    ship(data, usual.key, replace(GOOD, stages=2))
    assert product().configs[16].stages == 2 and "with Triton" not in tuned.in_use(DEFAULT).lines()[0], "its own"


def test_the_file_of_an_h200_serves_an_h100() -> None:
    found = tuned.in_use(replace(DEFAULT, name="NVIDIA H100 80GB HBM3"))
    assert found.is_borrowed and found.file is not None and found.file.gpu == "NVIDIA H200"


def test_what_does_not_fit_the_weight_is_named(data: Path) -> None:
    usual = product()
    ship(data, usual.key, replace(GOOD, block_n=256))
    assert product().configs == usual.configs
    assert "does not fit" in tuned.in_use(DEFAULT).lines()[1]


ENTRY = {"config": asdict(GOOD), "microseconds": 1.0, "before_microseconds": 2}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ('{"gpu"', "not valid JSON"), ("[]", "JSON object"),
        ({"gpu": "NVIDIA H200"}, "measured on NVIDIA H200"), ({"triton": "2.0.0"}, "Triton 2.0.0"),
        ({"sms": "132"}, "sms must be a number"), ({"date": 3}, "date must be a text"),
        ({"speed": 9}, "unknown field 'speed'"),
        ({"entries": []}, "entries must be an object"), ({"entries": {"a": {"17": ENTRY}}}, "no bucket"),
        ({"entries": {"a": {"16": ENTRY | {"loops": 1}}}}, "unknown field 'loops'"),
        ({"entries": {"a": {"16": {"config": ENTRY["config"]}}}}, "lacks 'before_microseconds'"),
        ({"entries": {"a": {"16": ENTRY | {"microseconds": float("nan")}}}}, "positive"),
        *(({"entries": {"a": {"more": ENTRY | {"config": asdict(GOOD) | bad}}}}, named) for bad, named in (
            ({"block_m": 24}, "block_m must be a power of two"), ({"block_n": 512}, "to 256, not 512"),
            ({"warps": 64}, "warps"), ({"stages": 0}, "stages"), ({"splits": 0}, "splits"), ({"splits": 99}, "splits"),
            ({"stages": 2.5}, "stages must be of type int"), ({"swap": 1}, "swap must be of type bool"),
            ({"clusters": 2}, "unknown field 'clusters'"),
        )),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_line_and_the_defaults(
    data: Path, damage: str | dict[str, Any], named: str
) -> None:
    usual = product()
    path = ship(data, usual.key)
    path.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(path.read_text()) | damage))
    tuned.in_use.cache_clear()
    (line,) = tuned.in_use(DEFAULT).lines()
    assert line.startswith("defaults: ") and named in line and "\n" not in line
    assert product().configs == usual.configs
    with pytest.raises(CheckpointError):
        tuned.read(path, DEFAULT)
    assert tuned.resume(path, DEFAULT, "again").entries == {}


def test_what_the_gpu_refuses_is_named_and_the_defaults_are_used(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = product()
    ship(data, usual.key)
    one, other = product(), product()
    run = type(one).run

    def refused(self: Any, rows: int) -> None:
        if self.configs[bucket_of(rows)] == GOOD:
            raise autotune.REFUSALS[0](300_000, 232_448, "shared memory")
        run(self, rows)

    monkeypatch.setattr(type(one), "run", refused)
    autotune.prove([one, other], DEFAULT, tuned.in_use(DEFAULT))
    assert one.configs == other.configs == usual.configs == product().configs
    assert "shared memory" in tuned.in_use(DEFAULT).lines()[1]


def test_what_is_batch_invariant_goes_by_nothing_measured(data: Path) -> None:
    """A file with another split for every number of rows: bits are those of no file, and of any batch."""
    fixed = product(40, inp=1024, invariant=True)
    before = fixed.configs
    fixed.run(40)
    together = fixed.op.out.clone()
    file = tuned.begin(DEFAULT, "a test")
    rows = zip(BUCKETS, (1, 2, 4, 3, 5, 1))
    file.entries[product(inp=1024).key] = {b: tuned.Measured(replace(GOOD, splits=s), 1.0, 1.0) for b, s in rows}
    file.write(tuned.file_of(DEFAULT, data))
    tuned.in_use.cache_clear()
    assert product(40, inp=1024).configs[32].splits == 2, "the other mode goes by it"
    for count in (1, 17, 40):
        alone = product(40, inp=1024, invariant=True)
        assert alone.configs == before
        alone.op.x.copy_(fixed.op.x)
        alone.run(count)
        assert torch.equal(alone.op.out[:count], together[:count])


def test_a_model_is_timed_once(few: None, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "here.json"
    products = [product(), product(), product(out=256)]
    seen: list[tuple[int, int]] = []

    def tuner(products: list[Any], times: dict[Config, float]) -> Tuner:
        return Tuner(Clock(CPU, products=products[:1], times=times))

    wanted = candidates(products[0], 16)[2]
    only = [products[0], products[1]]
    first = autotune.autotune(only, DEFAULT, tuner(only, {wanted: 0.5}), path, lambda *at: seen.append(at))
    assert (first.timed, first.known, first.left) == (2, 0, 0) and seen == [(0, 2), (1, 2), (2, 2)]
    again = [product(), product()]
    clock = Clock(CPU, products=again)
    second = autotune.autotune(again, DEFAULT, Tuner(clock), path)
    assert (second.timed, second.known) == (0, 2) and clock.timed == []
    assert [each.configs for each in again] == [each.configs for each in only] and again[0].configs[16] == wanted
    more = [products[2]]
    third = autotune.autotune(more, DEFAULT, tuner(more, {}), path)
    assert third.timed == 2 and tuned.read(path, DEFAULT).count == 4
    late = autotune.autotune([product(out=384)], DEFAULT, Tuner(Clock(CPU), until=0.0), path)
    assert (late.timed, late.left) == (0, 2) and "2 are left" in late.lines()[0]


def test_a_cache_that_is_broken_is_made_again_and_one_that_cannot_be_is_none(few: None, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text("{")
    one = product(10)
    found = autotune.autotune([one], DEFAULT, Tuner(Clock(CPU, products=[one])), path)
    assert found.timed == 1 and "made again" in found.lines()[1] and tuned.read(path, DEFAULT).count == 1
    (tmp_path / "file").touch()
    found = autotune.autotune([one], DEFAULT, Tuner(Clock(CPU, products=[one])), tmp_path / "file" / "here.json")
    assert found.timed == 1 and "not kept" in found.lines()[1]


def test_the_cache_is_of_this_gpu_triton_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = autotune.cache_file(replace(DEFAULT, name="NVIDIA H200"))
    assert path.parent == tmp_path / "qserve" / "tuned" and path.name.startswith("nvidia-h200-triton-3.")
    monkeypatch.setattr(autotune, "kernels_hash", lambda: "another")
    assert autotune.cache_file(DEFAULT) != path and "another" in autotune.cache_file(DEFAULT).name


def test_the_hash_is_of_the_kernels_of_products() -> None:
    """Those that a module of the products, or one of theirs, defines or imports: all, and no others."""
    assert [each.__module__.rpartition(".")[2] for each in get_args(tune.Tunable)] == list(tuned.PRODUCTS)
    found, seen = tuned.kernels(), {}
    for name in {name.partition(".")[0] for name in found}:
        for each in vars(import_module(f"qserve.kernels.triton.{name}")).values():
            if isinstance(each, type(weight_only.weight_only_kernel)):
                seen[f"{each.fn.__module__.rpartition('.')[2]}.{each.fn.__name__}"] = inspect.getsource(each.fn)
    assert seen == found
    assert found.keys() >= {"weight_only.weight_only_kernel", "persistent.persistent_kernel", "finish.finish"}
    assert not any(name.startswith("attention.") for name in found)


def test_an_executor_knows_the_products_of_its_programs(tiny_packed: Path) -> None:
    engine = Engine(str(tiny_packed), EngineConfig(kernels="triton", max_num_seqs=2, max_num_batched_tokens=16))
    decoder = engine.runner.decoder  # type: ignore[attr-defined]
    executor = decoder.executor
    assert isinstance(executor, TritonExecutor) and engine.notes == ()
    layers = decoder.config.num_hidden_layers
    keys = autotune.by_key(executor.products)
    assert len(executor.products) == 4 * layers + 1 and {len(each) for each in keys.values()} >= {layers}


@pytest.mark.parametrize(
    ("kernels", "named"),
    [("triton", "on a GPU"), ("triton-invariant", "on a GPU"), ("reference", "reference kernels have no")],
)
def test_without_a_gpu_nothing_is_timed(tiny_packed: Path, kernels: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Engine(str(tiny_packed), EngineConfig(kernels=kernels, autotune=True))


def test_the_invariant_mode_is_never_timed() -> None:
    executor = TritonExecutor(CPU, torch.float16, invariant=True)
    executor.placement = replace(executor.placement, device=torch.device("cuda"))
    with pytest.raises(UsageError, match="fixed, or results would vary"):
        registry.require_autotune(executor)
    assert registry.settle(executor) == []


@pytest.mark.slow
def test_candidates_are_compiled_at_once_for_a_gpu(tmp_path: Path) -> None:
    """By the threads of ``compiling``: without a GPU, and without the interpreter."""
    program = Path(__file__).parent / "many_compiled.py"
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, str(program)], env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made, wanted = map(int, done.stdout.split())
    assert made == wanted > 1


def test_a_configuration_that_spoils_one_row_of_many_is_wrong() -> None:
    want = torch.randn(512, 64)
    y = want.clone()
    assert tune._is_near(y + 1e-3 * torch.randn_like(y), want)
    y[77] *= 1.2  # 1 % of the norm of all
    assert not tune._is_near(y, want)
    y[77] = torch.nan
    assert not tune._is_near(y, want)
