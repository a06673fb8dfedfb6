"""The environments of other people's tools: ``python tests/environments.py GROUP DIR [NAME...]`` makes them in DIR.

Python tools get a virtual environment each, ``DIR/NAME/bin/python``, since they exclude each other (and some exclude
a transformers of this decade); the JavaScript one a folder with its ``node_modules``. What is complete is left alone,
and what cannot be made here is said and passed by: its tests skip. Exits with 1 where none could be made. To run the
tests with them: ``QSERVE_INTEROP=DIR pytest -m interop``, ``QSERVE_JUDGES=DIR pytest -m judges`` and
``QSERVE_FLEET=DIR pytest -m fleet``; what the peers are for is in ``tests/peers/contest.py`` and ``quantizers.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """``packages`` from PyPI, then ``alone`` without what they ask for: their own pins are years old, and they need
    nothing of it here. ``imports`` must succeed at the end. With ``node``, ``packages`` are from npm. With
    ``borrows`` it sees what the environment that makes it has, and only what is missing there is installed.
    ``bytecode`` is made at once, else as it is imported. ``variables`` of the process say how a package is compiled."""

    packages: tuple[str, ...]
    imports: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    node: bool = False
    borrows: bool = False
    bytecode: bool = False
    variables: tuple[tuple[str, str], ...] = ()


TORCH = "torch>=2.11,<2.14"
INTEROP = {
    # The last releases of two archived projects: neither knows a transformers after 4.51. Torch is large: ours.
    "archived": Environment(
        packages=(
            TORCH, "setuptools<81", "wheel", "numpy<2.4", "transformers==4.51.3", "peft==0.17.1", "accelerate==1.7.0",
            "datasets==3.6.0", "sentencepiece", "gekko", "rouge", "zstandard", "tabulate",
        ),
        alone=("auto-gptq==0.7.1", "autoawq==0.2.9"),
        imports=("auto_gptq", "awq"),
        borrows=True,
    ),
    "peft": Environment((TORCH, "transformers==5.23.0", "accelerate", "peft==0.21.2"), ("peft",), borrows=True),
    "compressed-tensors": Environment(
        packages=(TORCH, "transformers==5.23.0", "accelerate", "compressed-tensors==0.20.0"),
        imports=("compressed_tensors", "transformers"),
        borrows=True,
    ),
    "bitsandbytes": Environment((TORCH, "bitsandbytes==0.50.2"), ("bitsandbytes",), borrows=True),
    "modelopt": Environment(
        packages=(TORCH, "transformers==5.23.0", "accelerate", "nvidia-modelopt==0.47.0"),
        imports=("modelopt.torch.quantization", "modelopt.torch.export"),
        borrows=True,
    ),
    "quark": Environment(
        (TORCH, "transformers==5.23.0", "accelerate", "amd-quark==0.13"), ("quark.torch",), borrows=True
    ),
    "hqq": Environment(
        packages=(TORCH, "setuptools<81", "wheel", "termcolor", "transformers==5.23.0", "accelerate", "einops"),
        alone=("hqq==0.2.8.post1",),
        imports=("hqq.core.quantize",),
        borrows=True,
    ),
}
JUDGES = {
    "javascript": Environment(("openai@7.57.0",), node=True),
    "clients": Environment(
        ("litellm==1.106.2", "langchain-openai==1.7.3", "instructor==1.17.0", "anthropic==2.12.0"),
        ("litellm", "langchain_openai", "instructor", "anthropic"),
    ),
    "lm-eval": Environment(("lm-eval[api]==0.4.13", "transformers>=5,<6"), ("lm_eval", "transformers"), borrows=True),
    "giraffe": Environment(("giraffe-llm==0.1.0a1",), ("giraffe",)),
    "schemathesis": Environment(("schemathesis==4.32.5",), ("schemathesis",)),
    "deploy": Environment(
        ("kubernetes-validate==1.37.0", "promql-parser==0.12.0"), ("kubernetes_validate", "promql_parser")
    ),
    # torch, transformers and datasets are 1.3 GB of the 1.5 that it needs, and qserve has them.
    "guidellm": Environment(("guidellm==0.8.1", TORCH), ("guidellm",), borrows=True),
}
PEERS = {
    "llama-cpp": Environment(("llama-cpp-python>=0.3.16",), ("llama_cpp",)),  # compiled for this machine
    # Where what is compiled for the machine ends with an illegal instruction, as in some guests with AMX.
    "llama-cpp-avx512": Environment(
        ("llama-cpp-python>=0.3.16",), ("llama_cpp",),
        variables=(("CMAKE_ARGS", "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON "
                    "-DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"),),
    ),
    "llama-cpp-avx2": Environment(
        ("llama-cpp-python>=0.3.16",), ("llama_cpp",),
        variables=(("CMAKE_ARGS", "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"),),
    ),
    # optimum asks for a torchvision that does not fit every torch, and needs none of it here.
    "openvino": Environment(
        packages=(
            TORCH, "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0",
            "transformers==5.5.4", "requests",
        ),
        alone=("optimum==2.3.0", "optimum-intel==2.2.0"),
        imports=("openvino_genai", "optimum.intel"),
    ),
    # It asks for a torch newer than ours; nothing that is used here needs it.
    "gptqmodel": Environment(
        packages=(
            TORCH, "setuptools>=77", "wheel", "transformers==5.23.0", "accelerate", "datasets", "threadpoolctl",
            "device-smi", "protobuf", "pillow", "pypcre", "tokenicer", "logbar", "ninja", "torchao", "defuser",
            "requests",
        ),
        alone=("gptqmodel==7.7.0",),
        imports=("gptqmodel",),
    ),
    "llm-compressor": Environment((TORCH, "transformers==5.17.0", "llmcompressor==0.14.0.1"), ("llmcompressor",)),
    "auto-round": Environment((TORCH, "transformers==5.23.0", "auto-round==0.16.1"), ("auto_round",)),
}
# What qserve fleet needs, beside what qserve has.
FLEET = {"ray": Environment(("ray[serve]==2.60.0",), ("ray.serve",), borrows=True, bytecode=True)}
GROUPS = {"interop": INTEROP, "judges": JUDGES, "peers": PEERS, "fleet": FLEET}
COMPLETE = "complete.json"


def make(environment: Environment, home: Path) -> None:
    """Make it at ``home`` unless it is there already, made from the same pins."""
    # Last on the path, and as mere folders: the .pth files in them, qserve's own among them, do not count.
    borrowed = [folder for folder in sys.path if Path(folder).name == "site-packages"] if environment.borrows else []
    name, variables = home.name, dict(environment.variables)
    pins = json.dumps([*environment.packages, *environment.alone, *borrowed, *variables.values()])
    if (home / COMPLETE).exists() and (home / COMPLETE).read_text(encoding="utf-8") == pins:
        print(f"{name}: complete already")
        return
    print(f"{name}: making {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    if environment.node:
        home.mkdir(parents=True)
        (home / "package.json").write_text('{"private": true, "type": "module"}', encoding="utf-8")
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--silent")
        subprocess.run(["npm", "install", *options, *environment.packages], cwd=home, check=True)
    else:
        venv.create(home, with_pip=True)
        if borrowed:
            (site,) = home.glob("lib/python*/site-packages")
            (site / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")
        own = ["--no-cache-dir"] if variables else []  # else one that was compiled another way is taken
        # Most of it is never imported; but Ray starts several processes at a time, which all import the same.
        own += [] if environment.bytecode else ["--no-compile"]
        _run(home, "-m", "pip", "install", "--quiet", *own, *environment.packages, **variables)
        if environment.alone:
            # Not isolated: their build scripts import torch. Their CUDA extensions are not what is judged.
            options = ("--no-compile", "--no-deps", "--no-build-isolation")
            without = {"BUILD_CUDA_EXT": "0", "DISABLE_CUDA": "1"}
            _run(home, "-m", "pip", "install", "--quiet", *options, *environment.alone, **without)
        _run(home, "-c", f"import {', '.join(environment.imports)}", LITELLM_LOCAL_MODEL_COST_MAP="True")
    (home / COMPLETE).write_text(pins, encoding="utf-8")


def _run(home: Path, *arguments: str, **variables: str) -> None:
    subprocess.run([home / "bin" / "python", *arguments], check=True, env={**os.environ, **variables})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the group; default: all")
    parser.add_argument("--own", action="store_true", help="those alone that borrow nothing")
    arguments = parser.parse_args()
    known = GROUPS[arguments.group]
    if unknown := set(arguments.names) - set(known):
        parser.error(f"unknown environment {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    names = [name for name in arguments.names or known if not (arguments.own and known[name].borrows)]
    failed = []
    for name in names:
        try:
            make(known[name], arguments.directory.resolve() / name)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            failed.append(name)
            print(f"{name}: failed ({error})", file=sys.stderr)
    return 1 if len(failed) == len(names) else 0


if __name__ == "__main__":
    sys.exit(main())
