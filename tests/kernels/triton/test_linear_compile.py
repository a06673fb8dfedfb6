"""The linear products compiled for absent GPUs: the compiler's results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from qserve.kernels.triton import weight_only
from qserve.kernels.triton.target import DEFAULT, described
from qserve.kernels.triton.tuning import tuned
from qserve.kernels.triton.tuning.configs import BUCKETS, Config
from tests.kernels.triton import aot, linear_cases
from tests.kernels.triton.aot import loop

HERE = Path(__file__).parent


def check(name: str, made) -> None:  # type: ignore[no-untyped-def]
    architecture = re.findall(r"sm_\d+", name)[0]
    # What was measured best may park a register in the loop all the same.
    assert aot.parked(made) <= (2 if "-triton-" in name else 0), name
    assert made.registers <= 255, name
    assert made.shared_bytes <= described(architecture).shared_bytes, name


def resident(made, warps: int) -> int:  # type: ignore[no-untyped-def]
    """Programs that a multiprocessor of sm_90 holds at a time (CUDA programming guide, compute capabilities)."""
    registers = -(-made.registers // 8) * 8 * 32 * warps
    return int(min((64 << 10) // registers, (228 << 10) // (made.shared_bytes + 1024)))


def opcodes(made) -> set[str]:  # type: ignore[no-untyped-def]
    return set(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", made.sass, re.M))


@pytest.fixture(scope="module")
def compiled():  # type: ignore[no-untyped-def]
    return aot.compile_file(HERE / "linear_cases.py")


@pytest.mark.slow
def test_nothing_spills_and_shared_memory_suffices(compiled) -> None:  # type: ignore[no-untyped-def]
    assert {name.split()[0] for name in compiled} >= {
        "w4a16", "w8a16", "int8", "fp8", "persistent", "dequantize", "gather_columns", "experts", "trellis",
    }  # fmt: skip
    for name, made in compiled.items():
        check(name, made)


@pytest.mark.slow
def test_products_load_asynchronously(compiled) -> None:  # type: ignore[no-untyped-def]
    """Everything that the loop reads is copied ahead: weights, inputs and scales."""
    for name, made in compiled.items():
        if name.startswith(("w4", "w8", "int8", "fp8", "experts", "trellis few")):
            assert "async_copy_global_to_local" in made.ttgir and "cp.async" in made.ptx, name
            assert "LDGSTS" in opcodes(made), name
            body = loop(made)
            assert body and not any("LDG.E" in line for line in body), name


@pytest.mark.slow
def test_the_matrix_unit_is_used_as_each_architecture_wants(compiled) -> None:  # type: ignore[no-untyped-def]
    for name, made in compiled.items():
        if " few " in name:
            assert "mma.sync" in made.ptx, name
        elif " many " in name:
            wanted = "wgmma.mma_async" if "sm_90" in name else "tcgen05.mma"
            assert wanted in made.ptx and "mma.sync" not in made.ptx, name
    for name, opcode in (
        ("w4a16 many bf16 sm_90", "HGMMA"), ("int8 many sm_90", "IGMMA"), ("fp8 many sm_90", "QGMMA"),
        ("int8 few sm_80", "IMMA"), ("fp8 few sm_89", "QMMA"), ("w4a16 few bf16 sm_80", "HMMA"),
    ):  # fmt: skip
        assert opcode in opcodes(compiled[name]), name


@pytest.mark.slow
def test_words_are_unpacked_where_they_are_multiplied(compiled) -> None:  # type: ignore[no-untyped-def]
    """No conversion between layouts in the loop, and little more than one instruction to a weight."""
    for name, made in compiled.items():
        if name.startswith("w4a16 few"):
            body = loop(made)
            outputs = weight_only.default(16, 4, 128, described(name.split()[-1])).block_n
            weights = outputs * 256 / 128  # a block of 256 inputs, of 128 threads
            assert len(body) / (weights / 2) <= 5, name
            unpacking = [line for line in body if re.search(r"\b(LOP3|SHF|PRMT|HADD2|HFMA2|I2F|F2F)", line)]
            assert len(unpacking) / weights < 1.4, name
            assert len(body) / weights < 2.5, name
            assert not any(re.search(r"\bSTS", line) for line in body), name
            # A field of bfloat16 is a subnormal number until one fused multiply-add has made it a weight.
            assert not re.search(r"ftz\S*bf16|HFMA2\S*FTZ", made.ptx + made.sass), name


@pytest.mark.slow
def test_streams_are_decoded_where_they_are_multiplied(compiled) -> None:  # type: ignore[no-untyped-def]
    """Words reach the operands of the matrix unit as numbers would, nothing is shuffled or decoded twice, and a weight
    takes some nine instructions."""
    for name, made in compiled.items():
        if name.startswith("trellis few"):
            body = loop(made)
            weights = 256 * 64 / 128  # a block of 256 outputs and 64 inputs, of 128 threads
            assert len(body) / weights < 9.5, name
            assert sum("MMA" in line for line in body) == weights / 4, name
            assert not any(re.search(r"\b(STS|SHFL)", line) for line in body), name


@pytest.mark.slow
def test_the_persistent_product_is_fed_by_the_copy_engine(compiled) -> None:  # type: ignore[no-untyped-def]
    """Boxes are copied by one instruction each, the matrix unit reads them from shared memory, and what e4m3 products
    of sm_90 sum by themselves begins at zero with every box of weights."""
    for name, made in compiled.items():
        if not name.startswith("persistent"):
            continue
        assert "async_tma_copy_global_to_local" in made.ttgir and "cp.async.bulk.tensor" in made.ptx, name
        assert "UTMALDG" in opcodes(made) and "mma.sync" not in made.ptx, name
        if "sm_90" in name:
            body = loop(made)
            products = [line for line in body if "QGMMA" in line]
            fresh = [line for line in products if re.search(r"\bRZ\b", line)]
            assert sum("UTMALDG" in line for line in body) == len(fresh) + 1, name
            assert len(products) == 128 // 32 * len(fresh), name
        else:
            assert "tcgen05.mma" in made.ptx, name
    assert resident(compiled["persistent small sm_90"], warps=8) == 2


def test_what_is_shipped_is_among_the_configurations(tmp_path: Path) -> None:
    tiles, many = Config(32, 64, 4, 5, splits=3), Config(128, 256, 8, 3, splits=1, kernel="persistent")
    keys = {
        "weight_only bfloat16 bits=4 group=128 pairs n=6144 k=4096": {32: tiles},
        "weight_only float16 bits=8 group=0 float n=6144 k=4096": {32: tiles},
        "eight_bit fp8 group=128,128 n=6144 k=4096": {32: tiles, BUCKETS[-1]: many},
    }
    file = tuned.begin(replace(DEFAULT, name="NVIDIA H200"), "a test")
    for key, each in keys.items():
        file.entries[key] = {bucket: tuned.Measured(config, 1.0, 2.0) for bucket, config in each.items()}
    file.write(tmp_path / "nvidia-h200-triton-3.9.json")
    found = linear_cases.tuned_cases(tmp_path)
    assert [case.kernel.__name__ for case in found.values()] == [
        *["weight_only_kernel"] * 4, "eight_bit_kernel", "persistent_kernel",
    ]  # fmt: skip
    for case in list(found.values())[:-1]:
        assert (case.architecture, case.num_warps, case.num_stages) == ("sm_90", 4, 5) and case.constexprs["SPLIT"]
        assert (case.constexprs["BLOCK_M"], case.constexprs["BLOCK_N"]) == (32, 64)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_configuration_that_is_shipped(one_in: int) -> None:
    made = aot.compile_file(HERE / "linear_cases.py", "every_case", 3500, one_in)
    assert {re.search(r"sm_(\d+)", name)[1] for name in made} == {"80", "89", "90", "100"}  # type: ignore[index]
    for name, each in made.items():
        check(name, each)
