"""The memory plan: its arithmetic against what is really allocated, and its refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qserve.checkpoint.demo import demo_path
from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.modules import LLAMA
from qserve.checkpoint.source import open_model
from qserve.kernels import registry
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.memory import held_bytes, layer_bytes, plan_memory, weight_bytes
from qserve.runtime.models.config import decoder_config
from tests.peers import make_random


@pytest.mark.parametrize("packed", [False, True])
def test_the_plan_counts_what_is_allocated(tiny_model: Path, tiny_packed: Path, packed: bool) -> None:
    source = open_model(tiny_packed if packed else tiny_model)
    engine = Engine(source, EngineConfig(kv_cache_memory=1 << 20, threads=1))
    decoder = engine.runner.decoder  # type: ignore[attr-defined]
    assert decoder.kv.nbytes == engine.memory.kv_cache <= 1 << 20
    cache = decoder.kv.untyped_storage().data_ptr()
    held = [t for p in (*(program for _, program in decoder._body), decoder._head) for t in getattr(p, "_keep", [])]
    kept = {t.data_ptr(): t for t in held if t.untyped_storage().data_ptr() != cache}
    if not kept:
        pytest.skip("only the native kernels keep their weights in one place")
    # Tiles of weights have three or four axes, norms one; of the matrices only the embedding is a weight.
    weights = sum(t.nbytes for t in kept.values() if t.dim() != 2 or t.shape == (engine.vocab_size, 64))
    assert weight_bytes(source, LLAMA, registry.make(), int8_head=packed) == pytest.approx(weights, rel=0.05)


def test_refusals_carry_the_arithmetic(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = decoder_config(open_model(tiny_model).config, "tiny")
    plan = {"weights": 10, "workspace": 10, "kv_dtype": torch.float16, "context": 512}
    wishes = EngineConfig(max_num_seqs=4)
    block = config.kv_bytes_per_token(2) * 16
    found = plan_memory(config.cache_layout, **plan, config=replace(wishes, kv_cache_memory=7 * block))  # type: ignore[arg-type]
    assert (found.num_blocks, found.max_model_len, found.kv_cache) == (7, 112, 7 * block)
    unlimited = plan_memory(config.cache_layout, **plan, config=wishes)  # type: ignore[arg-type]
    assert unlimited.num_blocks == 4 * 32 and unlimited.max_model_len == 512
    monkeypatch.setattr("qserve.runtime.memory.available_memory", lambda: 60 * block)
    monkeypatch.setattr("qserve.runtime.memory.total_memory", lambda: 100 * block)
    for share, blocks in ((0.9, 49), (0.5, 9), (1.0, 59)):  # 40 are in use, and one goes to weights and workspace
        found = plan_memory(config.cache_layout, **plan, config=replace(wishes, gpu_memory_utilization=share))  # type: ignore[arg-type]
        assert found.num_blocks == blocks
    with pytest.raises(CapacityError, match="does not fit"):
        plan_memory(config.cache_layout, **plan, config=replace(wishes, gpu_memory_utilization=0.4))  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="weights"):
        plan_memory(config.cache_layout, **{**plan, "weights": 1 << 60}, config=wishes)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="need 20"):
        plan_memory(config.cache_layout, **plan, config=replace(wishes, max_model_len=320, kv_cache_memory=7 * block))  # type: ignore[arg-type]


def test_what_a_step_reads_belongs_to_a_layer(tiny_packed: Path) -> None:
    source, executor = open_model(tiny_packed), registry.make()
    held = held_bytes(source, LLAMA, executor, int8_head=True)
    first, last = layer_bytes(held, LLAMA, 2)
    ends = sum(size for name, size in held.items() if name in ("model.norm.weight", "lm_head"))
    assert first == last - ends > 0 and ends > source.shape("model.embed_tokens.weight")[0] * 64
    assert first + last == sum(held.values()) - held["model.embed_tokens.weight"]


def test_the_peak_is_the_sum_of_its_parts(tiny_packed: Path) -> None:
    source = open_model(tiny_packed)
    plan = Engine(source, EngineConfig(kv_cache_memory=1 << 20, threads=1)).memory
    assert plan.files == sum(file.stat().st_size for file in tiny_packed.glob("*.safetensors")) > 0
    assert plan.process > 50 << 20, "an interpreter with torch"
    assert plan.peak == plan.process + plan.files + plan.weights + plan.workspace + plan.kv_cache
    assert f"{plan.peak / 2**20:.1f} MiB resident" in plan.lines()[2]


_FILL = """
from pathlib import Path
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import SamplingParams

engine = Engine("demo", EngineConfig(kv_cache_memory=100 << 20, max_num_seqs=32))
params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
for number in range(16):
    prompt = [number + 5] * (engine.memory.num_blocks - 16)  # a sixteenth of all positions, and a little less
    engine.submit(str(number), prompt, params, cache_salt=str(number))
while engine.has_work():
    engine.step()
# Not the maximum of getrusage: that counts what the process was forked from.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(engine.memory.peak, int(status["VmHWM"].split()[0]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not demo_path().exists(), reason="no demo")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process its peak")
def test_the_peak_is_what_is_resident_at_most() -> None:
    """In a process of its own, with every block used once."""
    done = subprocess.run([sys.executable, "-c", _FILL], capture_output=True, text=True, check=True)
    predicted, measured = map(int, done.stdout.split())
    assert predicted == pytest.approx(measured, rel=0.05)


_LOAD = """
import json, os, sys
from pathlib import Path
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

def told(name, pid):
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024

before = told("VmRSS", os.getpid())
options = {"kv_cache_memory": 8 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64, "threads": 1}
engine = Engine(sys.argv[1], EngineConfig(**options, **json.loads(sys.argv[2])))
others = engine._ranks.pids if engine._ranks else []
print(json.dumps([engine.notes, [told("VmHWM", pid) - before for pid in (*others, os.getpid())]]))
engine.close()
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ends are a fifth of it and whose layers are many, as in one of eight billion parameters."""
    shape = {**make_random.SHAPES["qwen3-8b"], "num_hidden_layers": 22, "vocab_size": 24000, "hidden_size": 2048,
             "intermediate_size": 6144}  # fmt: skip
    out = tmp_path_factory.mktemp("large") / "w4"
    make_random.make(shape, out)
    return out


def shares_of(path: Path, notes: list[str]) -> list[int]:
    """Bytes of the checkpoint that are each process's: all, half of everything, or some layers and what is at their
    end."""
    sizes = {}
    for file in path.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        sizes |= {name: end - begin for name, each in header.items() if name != "__metadata__"
                  for begin, end in [each["data_offsets"]]}
    stages = re.findall(r"stages of (\d+), (\d+) layers", " ".join(notes))
    if not stages:
        ranks = 2 if any("2 ranks" in note for note in notes) else 1
        return [sum(sizes.values()) // ranks] * ranks
    shares = [0, 0]
    for name, size in sizes.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        behind = int(layer[1]) >= int(stages[0][0]) if layer else name != "model.embed_tokens.weight"
        shares[behind] += size
    return shares


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process its peak")
@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 1.15), ({"tensor_parallel_size": 2}, 1.2), ({"pipeline_parallel_size": 2}, 1.2)],
    ids=["alone", "two shards", "two stages"],
)
def test_a_load_needs_little_more_than_its_part_of_the_checkpoint(
    large: Path, options: dict[str, int], most: float
) -> None:
    command = [sys.executable, "-c", _LOAD, str(large), json.dumps(options)]
    notes, peaks = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    shares = shares_of(large, notes)
    assert sum(shares) > 500e6 and len(shares) == max([1, *options.values()])
    assert [peak <= most * share for peak, share in zip(peaks, shares, strict=True)] == [True] * len(shares), (
        peaks, shares
    )
