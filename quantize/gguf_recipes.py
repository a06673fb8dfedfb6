"""llama.cpp's mixtures of K-quants by their names: which tensor of a file has which type.

``Q4_K_M`` is ``Q4_K``, but for tensors whose errors cost most. Those are known from llama.cpp's own quantizer, whose
files of the same name this gives the same types: not the tensors of mixtures of eight experts, to which it gives more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.gguf_schemes import GGUF_SCHEMES
from qserve.checkpoint.spec import SUPERBLOCK, WeightScheme

if TYPE_CHECKING:
    from qserve.checkpoint.gguf_tensors import Stored

Layers = Callable[[int, int], bool]
"""Whether layer i of n is meant."""


def _all(i: int, n: int) -> bool:
    return True


def _first(part: int) -> Layers:
    return lambda i, n: i < n // part


def _outer_and_every_third(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


_VALUES, _DOWN, _HEAD, _EMBEDDING = "attn_v", "ffn_down", "output", "token_embd"
Rule = tuple[str, Layers, str]
"""Of a tensor in some layers, the type."""


@dataclass(frozen=True)
class Recipe:
    """The ``usual`` type, and ``rules`` of which the first that applies goes before it."""

    usual: str
    rules: tuple[Rule, ...] = ()


def _everywhere(**types: str) -> tuple[Rule, ...]:
    return tuple((name, _all, kind) for name, kind in types.items())


_MORE = ((_VALUES, _outer_and_every_third, "Q6_K"), (_DOWN, _outer_and_every_third, "Q6_K"))
RECIPES = {
    "Q3_K_S": Recipe("Q3_K"),
    "Q3_K_M": Recipe("Q3_K", (
        (_VALUES, lambda i, n: i < 2, "Q5_K"), (_DOWN, _first(16), "Q5_K"),
        *_everywhere(attn_v="Q4_K", attn_qkv="Q4_K", attn_output="Q4_K", ffn_down="Q4_K"),
    )),
    "Q3_K_L": Recipe("Q3_K", _everywhere(attn_v="Q5_K", attn_qkv="Q4_K", attn_output="Q5_K", ffn_down="Q5_K")),
    "Q4_K_S": Recipe("Q4_K", ((_VALUES, lambda i, n: i < 4, "Q5_K"), (_DOWN, _first(8), "Q5_K"))),
    "Q4_K_M": Recipe("Q4_K", (*_MORE, *_everywhere(attn_qkv="Q5_K"))),
    "Q5_K_S": Recipe("Q5_K"),
    "Q5_K_M": Recipe("Q5_K", (*_MORE, *_everywhere(attn_qkv="Q6_K"))),
    "Q6_K": Recipe("Q6_K"),
}  # fmt: skip
_OF_HEAD = "Q6_K"
"""The type of an output layer, and of an embedding that is also one, in every recipe."""
_NARROW = {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What takes the place of a type whose blocks do not fill a row, as at llama.cpp."""


def schemes_of(
    recipe: Recipe, tensors: Mapping[str, Stored], shapes: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, WeightScheme | None], tuple[str, ...]]:
    """The scheme of each module in ``shapes``, (out, in) each, None in floating point; and a line for each kind of
    deviation. ``tensors`` has where a file holds the weights, by transformers' names. Raises ``UsageError`` for a
    module that has no place there."""
    layers: dict[str, list[str]] = {}
    for module in shapes:
        if f"{module}.weight" not in tensors:
            raise UsageError(f"{module} has no place in a GGUF file; choose another --scheme")
        name, layer = _place(tensors[f"{module}.weight"])
        if layer not in (alike := layers.setdefault(name, [])):  # experts of a layer count once
            alike.append(layer)
    found: dict[str, WeightScheme | None] = {}
    deviations: dict[tuple[int, str], int] = {}
    for module, (_, inp) in shapes.items():
        name, layer = _place(tensors[f"{module}.weight"])
        kind = _type(recipe, name, layers[name].index(layer), len(layers[name]), tied=_HEAD not in layers)
        if inp % SUPERBLOCK or not tensors[f"{module}.weight"].keeps_rows:
            narrow = _NARROW[kind] if inp % 32 == 0 else "floats"
            deviation = inp, f"{narrow} rather than {kind}"
            deviations[deviation] = deviations.get(deviation, 0) + 1
            kind = narrow
        found[module] = GGUF_SCHEMES.get(kind)
    notices = (f"{count} linears of {inp} inputs are {kinds}, whose blocks are of {SUPERBLOCK}"
               for (inp, kinds), count in deviations.items())  # fmt: skip
    return found, tuple(notices)


def _place(stored: Stored) -> tuple[str, str]:
    """``blk.3.attn_v.weight`` -> ``attn_v`` and the layer's name. Experts have the types of other linears."""
    layer, _, name = stored.names[0].removesuffix(".weight").rpartition(".")
    return name.removesuffix("_exps").removesuffix("_shexp"), layer


def _type(recipe: Recipe, name: str, i: int, n: int, *, tied: bool) -> str:
    if name == _HEAD or (name == _EMBEDDING and tied):
        return _OF_HEAD
    return next((kind for tensor, layers, kind in recipe.rules if tensor == name and layers(i, n)), recipe.usual)
