"""compressed-tensors decompresses 4-bit floats: hands the parts of the module in DIR, which another scheme of its own
presets describes, to its compressor, and writes the weight to ``out.safetensors``. It computes in bfloat16."""

from __future__ import annotations

from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from llama import run_jobs
from safetensors.torch import load_file, save_file


def main(directory: Path, preset: str, format: str) -> None:
    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(format)
    weight = compressor.decompress(load_file(directory / "parts.safetensors"), scheme)["weight"]
    save_file({"weight": weight.contiguous()}, directory / "out.safetensors")


if __name__ == "__main__":
    run_jobs(main)
