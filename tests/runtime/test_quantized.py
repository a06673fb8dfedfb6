"""Checkpoints with int8 and fp8 weights, inputs and KV caches, written to disk and served: the numbers they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.formats import FORMATS
from qserve.checkpoint.grid import AFFINE, BNB_FP4, NF4, Grid
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.modules import LLAMA
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, KVScheme, QuantSpec, WeightScheme
from qserve.checkpoint.writer import CheckpointWriter
from qserve.kernels import native, registry
from qserve.kernels.executor import HOST, Step
from qserve.kernels.ops import Linear
from qserve.kernels.reference import round_input
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.memory import weight_bytes
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.runner import DecoderRunner
from qserve.runtime.sampling import SamplingParams

INT8, FP8 = ActivationScheme("int8"), ActivationScheme("fp8")
FP8_CHANNEL = WeightScheme(8, -1, dtype="fp8")
EMBEDDING = "model.embed_tokens"
SaveQuantized = Callable[..., Path]


@dataclass(frozen=True)
class Case:
    spec: QuantSpec
    format: str = "compressed-tensors"
    embedding: bool = False
    kv: dict[str, torch.Tensor] = field(default_factory=dict)


def spec(weights: WeightScheme, activations: ActivationScheme | None, **fields: object) -> QuantSpec:
    return QuantSpec("rtn", weights, activations, **fields)  # type: ignore[arg-type]


CASES = {
    "w8a8": Case(spec(WeightScheme(8, -1), INT8)),
    "w8a8-static": Case(spec(WeightScheme(8, -1), ActivationScheme("int8", "tensor", dynamic=False))),
    "w4a8": Case(spec(WeightScheme(4, 32), INT8)),
    "fp8-channel": Case(spec(FP8_CHANNEL, FP8)),
    "fp8-weights": Case(spec(FP8_CHANNEL, None)),
    "fp8-static": Case(
        spec(replace(FP8_CHANNEL, rows=-1), ActivationScheme("fp8", "tensor", dynamic=False)), format="fp8"
    ),
    "fp8-blocks": Case(
        spec(replace(FP8_CHANNEL, rows=32, group_size=32), ActivationScheme("fp8", "group", group_size=32)),
        format="fp8",
    ),
    "w8a8-tied-embedding": Case(
        spec(WeightScheme(8, -1), INT8, float_inputs=(EMBEDDING,), ignored=()), embedding=True
    ),
    "w6a8-tied-embedding": Case(
        spec(WeightScheme(6, 32), INT8, float_inputs=(EMBEDDING,), ignored=()), embedding=True
    ),
}


def rounded(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """To nearest, from the largest magnitude that shares a scale."""
    out, inp = weight.shape
    width, height = scheme.group_width(inp), scheme.row_height(out)
    limit = 448.0 if scheme.dtype == "fp8" else float(scheme.zero - 1)
    blocks = weight.float().abs().view(-(-out // height), height, inp // width, width).amax((1, 3)) / limit
    scales = blocks.repeat_interleave(height, 0).contiguous()
    ratio = weight.float() / scales.repeat_interleave(width, 1)
    if scheme.dtype == "fp8":
        codes = ratio.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = (ratio.round() + scheme.zero).to(torch.uint8)
    return QuantizedWeight(scheme, codes, scales)


def save(source: HFDirectory, case: Case, out: Path) -> Path:
    form, spec = FORMATS[case.format], case.spec
    with CheckpointWriter(out, format=form) as writer:
        for index, name in enumerate(source.names()):
            module, tensor = name.removesuffix(".weight"), source.tensor(name)
            linear = module.endswith("_proj") or (module == EMBEDDING and case.embedding)
            if not linear and not (module == "lm_head" and case.embedding):
                writer.put(name, tensor)
            elif linear:
                acts = spec.activations_of(module)
                # Scales differ among q, k and v, and clip a little.
                static = None if acts is None or acts.dynamic else (0.01 + 0.002 * (index % 5))
                static = static and static * (127 / 448 if acts and acts.dtype == "fp8" else 1)
                weight = replace(rounded(tensor, spec.weights), activations=acts, input_scale=static)
                writer.put_linear(module, weight)
        for name, scale in case.kv.items():
            writer.put(name, scale)
        config = {**source.config, "quantization_config": form.config_of(spec)}
        config["tie_word_embeddings"] = case.embedding
        writer.put_json("config.json", config)
        writer.finish()
    source.save_tokenizer(out)
    return out


@pytest.fixture(scope="module")
def checkpoints(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, dense = tmp_path_factory.mktemp("quantized"), HFDirectory(tiny_model)
    return {name: save(dense, case, root / name) for name, case in CASES.items()}


def decoder_of(path: Path, kernels: str, kv_dtype: torch.dtype = torch.float32) -> Decoder:
    if kernels != "reference" and native.missing():
        pytest.skip(str(native.missing()))
    source = HFDirectory(path)
    limits = DecoderLimits(max_tokens=64, max_logits=64, max_positions=64, num_blocks=8)
    config = decoder_config(source.config, path.name)
    return Decoder(source, config, registry.make(kernels, threads=2), limits, kv_dtype=kv_dtype)


def run(decoder: Decoder, sequences: list[tuple[int, list[int], list[int]]]) -> torch.Tensor:
    """Logits of one step: (tokens before, tokens, block table) per sequence."""
    ids, positions, slots, starts = [], [], [], [0]
    for start, tokens, table in sequences:
        ids += tokens
        positions += range(start, start + len(tokens))
        slots += [table[p // 16] * 16 + p % 16 for p in range(start, start + len(tokens))]
        starts.append(len(ids))
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    tables = as_int([table for *_, table in sequences])
    step = Step(as_int(ids), as_int(positions), as_int(slots), as_int(starts), tables, as_int([]))
    decoder.run(step)
    decoder.head(step, torch.arange(len(ids), dtype=torch.int32))
    return decoder.logits[: len(ids)].clone()


TOKENS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(7)).tolist()
TABLE = [5, 1, 7, 2]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def expected_logits(tiny_model: Path, path: Path) -> torch.Tensor:
    """Plain transformers on the dequantized weights, each input rounded by a hook."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    source = HFDirectory(path)
    for module in source.linears():
        packed = source.linear(module)
        layer = model.get_submodule(module)
        layer.weight.data = packed.dequantize()
        if module == EMBEDDING:
            model.lm_head.weight = layer.weight
        elif packed.activations is not None:
            layer.register_forward_pre_hook(
                lambda _, args, w=packed: (round_input(args[0], w.activations, w.input_scale),)
            )
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_with_rounded_inputs(
    tiny_model: Path, checkpoints: dict[str, Path], name: str, kernels: str
) -> None:
    decoder = decoder_of(checkpoints[name], kernels)
    error = relative_error(run(decoder, [(0, TOKENS, TABLE)]), expected_logits(tiny_model, checkpoints[name]))
    # A last bit may move an input across a tie: a few of them, a 127th or a 16th each.
    assert error < (0.01 if CASES[name].embedding else 5e-3)


def test_products_that_share_an_input_are_fused_where_they_agree(checkpoints: dict[str, Path]) -> None:
    def products(name: str) -> int:
        seen: list[Linear] = []
        executor = registry.make("reference")
        program = executor.program
        executor.program = lambda rows: _Recorder(program(rows), seen)  # type: ignore[method-assign]
        source = HFDirectory(checkpoints[name])
        Decoder(source, decoder_config(source.config, name), executor, DecoderLimits(8, 8, 16, 1))
        return len(seen) - 1  # without the head

    assert products("w8a8") == products("fp8-blocks") == 2 * 4
    assert products("w8a8-static") == 2 * 7  # their input scales differ


class _Recorder:
    def __init__(self, program: object, seen: list[Linear]) -> None:
        self._program, self._seen = program, seen

    def add(self, ops: list[object]) -> None:
        self._seen += [op for op in ops if isinstance(op, Linear)]
        self._program.add(ops)  # type: ignore[attr-defined]


def with_kv_scales(tiny_model: Path, dtype: str, granularity: str) -> dict[str, torch.Tensor]:
    """The scales of the keys and values that ``TOKENS`` leave in a float cache, and the mean of the keys."""
    decoder = decoder_of(tiny_model, "reference")
    decoder.kv.zero_()
    run(decoder, [(0, TOKENS, TABLE)])
    config = decoder.config
    blocks = decoder.kv.view(config.num_hidden_layers, 2, -1, config.num_key_value_heads, config.head_dim * 16)
    absmax = blocks.abs().amax((2, 4)) / (127 if dtype == "int8" else 448)
    if granularity == "tensor":
        absmax = absmax.amax(-1, keepdim=True)
    shape = (config.num_hidden_layers, -1, config.num_key_value_heads, config.head_dim, 16)
    mean = decoder.kv[:, 0].reshape(shape).sum((1, 4)) / len(TOKENS)  # the rest of the cache is zero
    found = {f"model.layers.{i}.self_attn.k_center": mean[i].clone() for i in range(config.num_hidden_layers)}
    return found | {
        f"model.layers.{i}.self_attn.{'kv'[j]}_scale": absmax[i, j].clone()
        for i in range(config.num_hidden_layers)
        for j in range(2)
    }


@pytest.fixture(scope="module")
def kv_checkpoints(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("kv"), {}
    for dtype in ("int8", "fp8"):
        for granularity in ("tensor", "head"):
            case = Case(
                spec(FP8_CHANNEL, None, kv_cache=KVScheme(dtype, granularity)),  # type: ignore[arg-type]
                kv=with_kv_scales(tiny_model, dtype, granularity),
            )
            found[f"{dtype}-{granularity}"] = save(HFDirectory(tiny_model), case, root / f"{dtype}-{granularity}")
    return found


KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("name", ["int8-tensor", "int8-head", "fp8-tensor", "fp8-head"])
def test_a_quantized_cache_is_close_to_a_float_one(kv_checkpoints: dict[str, Path], name: str) -> None:
    path, dtype = kv_checkpoints[name], KV_DTYPES[name.split("-")[0]]
    want = run(decoder_of(path, "reference"), [(0, TOKENS, TABLE)])
    reference = run(decoder_of(path, "reference", dtype), [(0, TOKENS, TABLE)])
    got = run(decoder_of(path, "native", dtype), [(0, TOKENS, TABLE)])
    assert 1e-4 < relative_error(reference, want) < (0.08 if dtype == torch.int8 else 0.15)
    assert relative_error(got, reference) < 5e-3


@pytest.mark.parametrize("isa", [f"native-{isa}" for isa in native.available()])
@pytest.mark.parametrize("name", [*CASES, "int8-head", "fp8-tensor"])
def test_logits_do_not_depend_on_chunks_neighbours_or_copied_blocks(
    checkpoints: dict[str, Path], kv_checkpoints: dict[str, Path], name: str, isa: str
) -> None:
    kv_dtype = KV_DTYPES.get(name.split("-")[0]) if name in kv_checkpoints else None
    decoder = decoder_of((checkpoints | kv_checkpoints)[name], isa, kv_dtype or torch.float16)
    whole = run(decoder, [(0, TOKENS, TABLE)])
    assert whole.isfinite().all()
    other = TOKENS[::-1][:9]
    chunks = [run(decoder, [(0, other, [3, 0, 0, 0]), (0, TOKENS[:16], TABLE)])[9:]]
    # The first block moves, as a block of the prefix cache does when it is written to.
    DecoderRunner(decoder).copy_blocks(((5, 4),))
    table = [4, *TABLE[1:]]
    chunks.append(run(decoder, [(16, TOKENS[16:17], table)]))
    chunks.append(run(decoder, [(17, TOKENS[17:], table), (9, other[:3], [3, 0, 0, 0])])[:-3])
    assert torch.equal(torch.cat(chunks), whole)


def test_auto_takes_what_the_checkpoint_was_calibrated_for(
    checkpoints: dict[str, Path], kv_checkpoints: dict[str, Path]
) -> None:
    def dtype(path: Path, option: str = "auto") -> torch.dtype:
        engine = Engine(str(path), EngineConfig(kv_cache_memory=1 << 17, kv_cache_dtype=option, threads=1))
        cache = engine.runner.decoder.kv  # type: ignore[attr-defined]
        assert cache.nbytes == engine.memory.kv_cache
        outputs = list(engine.generate(["hello world"], [SamplingParams(max_tokens=8, temperature=0.0)]))
        assert outputs[-1].finish_reason in ("length", "stop")
        return cache.dtype  # type: ignore[no-any-return]

    assert dtype(checkpoints["w8a8"]) == torch.float16
    assert dtype(kv_checkpoints["int8-head"]) == torch.int8
    assert dtype(kv_checkpoints["fp8-tensor"]) == torch.float8_e4m3fn
    assert dtype(kv_checkpoints["int8-head"], "fp16") == torch.float16
    assert dtype(kv_checkpoints["int8-head"], "fp8") == torch.float8_e4m3fn  # uncalibrated: the scale 1
    assert dtype(checkpoints["w8a8"], "fp8") == torch.float8_e4m3fn
    for path in (checkpoints["w8a8"], kv_checkpoints["fp8-tensor"]):
        with pytest.raises(UsageError, match=r"--kv-cache int8"):
            dtype(path, "int8")


def test_a_byte_per_element_holds_twice_the_tokens(tiny_model: Path) -> None:
    blocks = {
        option: Engine(
            str(tiny_model), EngineConfig(kv_cache_memory=1 << 18, kv_cache_dtype=option, threads=1)
        ).memory.num_blocks
        for option in ("fp16", "fp8")
    }
    assert blocks["fp8"] == 2 * blocks["fp16"]


@pytest.mark.parametrize("change", ["missing", "three", "center"])
def test_damaged_kv_scales_are_refused(tiny_model: Path, tmp_path: Path, change: str) -> None:
    scales = with_kv_scales(tiny_model, "int8", "head")
    if change == "missing":
        scales = {name: scale for name, scale in scales.items() if ".layers.1." not in name}
    else:
        name = "k_scale" if change == "three" else "k_center"
        scales[f"model.layers.1.self_attn.{name}"] = torch.ones(3, 1)
    case = Case(spec(FP8_CHANNEL, None, kv_cache=KVScheme("int8", "head")), kv=scales)
    path = save(HFDirectory(tiny_model), case, tmp_path / "damaged")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn") as raised:
        Engine(str(path), EngineConfig(kv_cache_memory=1 << 18, threads=1))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_counts_what_is_allocated(checkpoints: dict[str, Path], name: str) -> None:
    if native.missing():
        pytest.skip("only the native kernels keep their weights in one place")
    source = open_model(checkpoints[name])
    engine = Engine(source, EngineConfig(kv_cache_memory=1 << 18, threads=1))
    decoder = engine.runner.decoder  # type: ignore[attr-defined]
    kept = {t.data_ptr(): t for p in (*(p for _, p in decoder._body), decoder._head) for t in p._keep}
    named = vars(decoder._buffers)
    rotations = [table for pair in named["rotations"].values() for table in pair]
    every = [decoder.kv, *rotations, *(value for value in named.values() if isinstance(value, torch.Tensor))]
    buffers = {v.untyped_storage().data_ptr() for v in every}
    held = sum(
        t.nbytes
        for t in kept.values()
        if t.untyped_storage().data_ptr() not in buffers
        and not (t.dim() == 2 and t.shape == (decoder.limits.max_logits, 64))
    )
    assert weight_bytes(source, LLAMA, registry.make(), int8_head=True) == pytest.approx(held, rel=0.05)


def test_the_configuration_is_read_back(checkpoints: dict[str, Path]) -> None:
    """What the cases say is what the files say: no case is silently another."""
    for name, case in CASES.items():
        read = HFDirectory(checkpoints[name])
        assert read.spec is not None and json.loads((read.path / "config.json").read_text())
        module = "model.layers.0.mlp.down_proj"
        assert read.spec.scheme_of(module) == case.spec.weights
        assert read.linear(module).activations == case.spec.activations
        assert (EMBEDDING in read.linears()) == case.embedding


def served(source: HFDirectory, path: Path, tensors: dict[str, Tensor],
           quantization: dict[str, Any] | None = None) -> tuple[list[list[int]], tuple[str, ...]]:
    """The tokens of two prompts from ``source`` with other ``tensors``, and what the engine says."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = source.config | ({} if quantization is None else {"quantization_config": quantization})
    (path / "config.json").write_text(json.dumps(config))
    source.save_tokenizer(path)
    return generated(path)


def generated(path: Path) -> tuple[list[list[int]], tuple[str, ...]]:
    engine = Engine(str(path), EngineConfig(kv_cache_memory=1 << 20, threads=1, max_num_seqs=2))
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    outputs = engine.generate([[5, 6, 7], [8, 9]], [params, params])
    return [output.token_ids for output in outputs], tuple(engine.notes)


def split(source: HFDirectory) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """All tensors, and the shapes of the linears of the layers among them by module."""
    tensors = {name: source.tensor(name) for name in source.names()}
    return tensors, {name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
                     for name, tensor in tensors.items() if name.endswith("_proj.weight")}  # fmt: skip


@pytest.mark.parametrize(("kind", "grid"), [("nf4", NF4), ("fp4", BNB_FP4)])
def test_bitsandbytes_is_served_as_it_is_or_in_16_bits(
    kind: str, grid: Grid, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bitsandbytes stores it. Where kernels do not multiply it, the tokens are those of the same weights in floating
    point, and a note says so."""
    source = HFDirectory(tiny_model)
    tensors, linears = split(source)
    packed, dense = dict(tensors), dict(tensors)
    for module, (out, inp) in linears.items():
        assert inp % 64 == 0 and grid.codebook is not None
        state = {"quant_type": kind, "blocksize": 64, "shape": [out, inp]}
        codes = torch.randint(0, 256, (out * inp // 2, 1), dtype=torch.uint8)
        parts = {
            "absmax": torch.rand(out * inp // 64) * 0.2, "quant_map": torch.tensor(grid.codebook),
            f"quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }  # fmt: skip
        name = f"{module}.weight"
        packed |= {name: codes} | {f"{name}.{part}": tensor for part, tensor in parts.items()}
        numbers = torch.tensor(grid.codebook)[torch.cat([codes >> 4, codes & 15], 1).flatten().long()].view(out, inp)
        dense[name] = (numbers * parts["absmax"].view(out, -1).repeat_interleave(64, 1)).to(source.dtype())
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    _, notes = served(source, tmp_path / "packed", packed, config)
    assert not any("held in" in note for note in notes)
    decoders = [decoder_of(tmp_path / "packed", kernels) for kernels in ("native", "reference")]
    logits = [run(decoder, [(0, TOKENS, TABLE)]) for decoder in decoders]
    assert relative_error(*logits) < 0.01  # inputs are rounded, and numbers to 16 bits
    monkeypatch.setattr(native.NativeExecutor, "placement", replace(HOST, unpacked=(grid,)))
    found, notes = generated(tmp_path / "packed")
    assert found == served(source, tmp_path / "dense", dense)[0]
    assert any(f"{grid.name} are held in" in note for note in notes)


@pytest.mark.parametrize("told", [True, False])
def test_hqq_is_served_as_it_is_or_in_16_bits(
    told: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With transformers' configuration and, as hqq itself writes it, without one."""
    source = HFDirectory(tiny_model)
    tensors, linears = split(source)
    packed, dense = dict(tensors), dict(tensors)
    for module, (out, inp) in linears.items():
        codes = torch.randint(0, 256, (out * inp // 64 // 2, 64), dtype=torch.uint8)
        scale = (torch.rand(out * inp // 64, 1) * 0.02).to(torch.bfloat16)
        zero = (torch.rand(out * inp // 64, 1) * 15).to(torch.bfloat16)
        parts = {"W_q": codes, "scale": scale, "zero": zero, "shape": torch.tensor([out, inp])}
        parts |= {name: torch.tensor(number, dtype=torch.int32)
                  for name, number in (("nbits", 4), ("group_size", 64), ("axis", 1))}  # fmt: skip
        del packed[f"{module}.weight"]
        packed |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        numbers = torch.cat([codes >> 4, codes & 15]).to(torch.bfloat16)
        dense[f"{module}.weight"] = ((numbers - zero) * scale).view(out, inp).to(source.dtype())
    params = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}
    config = {"quant_method": "hqq", "quant_config": params, "skip_modules": ["lm_head"]} if told else None
    _, notes = served(source, tmp_path / "packed", packed, config)
    assert not any("held in" in note for note in notes)
    decoders = [decoder_of(tmp_path / "packed", kernels) for kernels in ("native", "reference")]
    logits = [run(decoder, [(0, TOKENS, TABLE)]) for decoder in decoders]
    assert relative_error(*logits) < 0.02  # inputs are rounded, but not the steps of dequantization
    monkeypatch.setattr(native.NativeExecutor, "placement", replace(HOST, unpacked=(AFFINE,)))
    found, notes = generated(tmp_path / "packed")
    assert found == served(source, tmp_path / "dense", dense)[0]
    assert any("weights in hqq are held in" in note for note in notes)
    pipeline.run(open_model(tmp_path / "packed"), tmp_path / "w4", QuantizeJob(method="rtn", calibration=None))
    assert HFDirectory(tmp_path / "w4").format.name == "gptq"  # it is a source of quantization, too


def test_llm_int8_is_served_as_int8_per_channel(tiny_model: Path, tmp_path: Path) -> None:
    """The tokens are those of the same weights in compressed-tensors, which no note says to be held in 16 bits."""
    source = HFDirectory(tiny_model)
    packed, linears = split(source)
    for module, (out, inp) in linears.items():
        packed[f"{module}.weight"] = torch.randint(-127, 128, (out, inp)).to(torch.int8)
        packed[f"{module}.SCB"] = torch.rand(out) * 0.2
        packed[f"{module}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    found, notes = served(source, tmp_path / "packed", packed, config)
    written = {name: tensor for name, tensor in packed.items() if name.rpartition(".")[0] not in linears}
    for module in linears:
        written[f"{module}.weight"] = packed[f"{module}.weight"]
        written[f"{module}.weight_scale"] = packed[f"{module}.SCB"][:, None] * (1 / 127)
    config = FORMATS["compressed-tensors"].config_of(spec(WeightScheme(8, -1), None))
    assert (found, notes) == served(source, tmp_path / "written", written, config)
    assert not any("held in" in note for note in notes)
