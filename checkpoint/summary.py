"""``Summary``: what a model is made of, for people. It reads headers only."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.source import ModelSource
from qserve.checkpoint.spec import ActivationScheme, KVScheme, WeightScheme


@dataclass(frozen=True)
class Summary:
    """``linears`` are the packed ones: (module, out, in, scheme). Sizes in bytes.

    ``float_inputs`` counts packed linears whose input is not rounded although ``activations`` says so for the rest.
    """

    name: str
    family: str
    part_of: str | None
    method: str
    parameters: int
    stored_bytes: int
    linears: tuple[tuple[str, int, int, WeightScheme], ...]
    format: str | None = None
    symmetric_zeros: bool = True
    activations: ActivationScheme | None = None
    float_inputs: int = 0
    kv_cache: KVScheme | None = None

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.parameters

    @property
    def bits_per_weight(self) -> float:
        """Over all weights; scales and everything else in the files count too."""
        return 8 * self.stored_bytes / self.parameters

    @property
    def packed_bits_per_weight(self) -> float | None:
        """Over the packed linears alone, with their fp16 scales and stored zero points; None for a dense model."""
        if not self.linears:
            return None
        zeros = self.symmetric_zeros
        bits = sum(s.storage_bits(out, inp, symmetric_zeros=zeros) for _, out, inp, s in self.linears)
        return bits / sum(out * inp for _, out, inp, _ in self.linears)

    def lines(self) -> list[str]:
        packed = sum(out * inp for _, out, inp, _ in self.linears)
        part = "" if self.part_of is None else f", the text part of {self.part_of}"
        lines = [
            f"model           {self.name} ({self.family}{part})",
            f"parameters      {self.parameters:,}; {packed:,} of them in {len(self.linears)} packed linears",
            f"size            {self.stored_bytes:,} bytes, {self.bits_per_weight:.2f} bits per weight "
            f"(bf16: {self.bf16_bytes:,} bytes)",
        ]
        if self.linears:
            schemes: dict[WeightScheme, int] = {}
            for *_, scheme in self.linears:
                schemes[scheme] = schemes.get(scheme, 0) + 1
            shown = ", ".join(f"{count} x {scheme}" for scheme, count in schemes.items())
            lines.append(f"quantization    {self.method}: {shown}; {self.packed_bits_per_weight:.2f} bits per weight")
            lines.append(f"format          {self.format}")
        if self.activations is not None:
            kept = f"; {self.float_inputs} linears keep theirs in floating point" if self.float_inputs else ""
            lines.append(f"inputs          {self.activations}{kept}")
        if self.kv_cache is not None:
            lines.append(f"KV cache        {self.kv_cache}")
        return lines

    def layer_rows(self) -> list[tuple[str, ...]]:
        return [(name, f"{out}", f"{inp}", f"{s.bits}", f"{s.group_size}") for name, out, inp, s in self.linears]


def summarize(source: ModelSource) -> Summary:
    """Raises ``CheckpointError`` where the model is damaged."""
    format = None if source.format is None else source.format.name
    if isinstance(source, GGUFFile):
        source, format = source.packed(), "gguf"  # as an engine holds it
    linears = []
    for module in source.linears():
        assert source.spec is not None
        out, inp = source.shape(module)
        linears.append((module, out, inp, source.spec.scheme_of(module) or source.spec.weights))
    dense = sum(prod(source.shape(name)) for name in source.names())
    return Summary(
        name=source.name,
        family=str(source.config.get("model_type")),
        part_of=source.part_of,
        method="dense" if source.spec is None else source.spec.method,
        parameters=dense + sum(out * inp for _, out, inp, _ in linears),
        stored_bytes=source.stored_bytes(),
        linears=tuple(linears),
        format=format,
        symmetric_zeros=source.format is None or source.format.symmetric_zeros,
        activations=None if source.spec is None else source.spec.activations,
        float_inputs=0 if source.spec is None else len(source.spec.float_inputs),
        kv_cache=None if source.spec is None else source.spec.kv_cache,
    )
