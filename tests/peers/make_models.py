"""The demo model as the peers read it: ``make_models.py ENVIRONMENTS DIR``, with the environments of ``peers``.

DIR/dense is the dense base, DIR/openvino-int4 and -int8 are made of it by optimum-cli, DIR/Q4_0.gguf and Q8_0.gguf by
llama.cpp from the file that the demo model comes in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import save_file

from qserve.checkpoint.demo import fetch_demo
from qserve.checkpoint.source import open_model

REQUANTIZE = """
import ctypes, llama_cpp, sys
for path, kind in zip(sys.argv[2:], (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = kind, True
    assert llama_cpp.llama_model_quantize(sys.argv[1].encode(), path.encode(), ctypes.byref(params)) == 0
"""


def make_dense(out: Path) -> Path:
    """``out``/dense: the base in float32, as a Hugging Face directory."""
    dense = out / "dense"
    if not (dense / "config.json").exists():
        dense.mkdir(parents=True, exist_ok=True)
        source = open_model("demo")
        tensors = {name: source.tensor(name).float().contiguous() for name in source.names()}
        save_file(tensors, str(dense / "model.safetensors"), metadata={"format": "pt"})
        source.save_tokenizer(dense)
        (dense / "generation_config.json").write_text(json.dumps(source.generation_config()))
        (dense / "config.json").write_text(json.dumps({**source.config, "dtype": "float32"}))
    return dense


def make(environments: Path, out: Path) -> None:
    """Make what is not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    dense = make_dense(out)
    optimum = str(environments / "openvino" / "bin" / "optimum-cli")
    for name, options in (("int4", ["--group-size", "64", "--sym", "--ratio", "1.0"]), ("int8", [])):
        if not (out / f"openvino-{name}" / "openvino_model.xml").exists():
            command = [optimum, "export", "openvino", "-m", str(dense), "--task", "text-generation-with-past"]
            command += ["--weight-format", name, *options, str(out / f"openvino-{name}")]
            subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    files = [out / "Q4_0.gguf", out / "Q8_0.gguf"]
    if not all(file.exists() for file in files):
        python = str(environments / "llama-cpp" / "bin" / "python")
        subprocess.run([python, "-c", REQUANTIZE, str(fetch_demo()), *map(str, files)], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
