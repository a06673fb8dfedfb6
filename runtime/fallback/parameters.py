"""``Parameters``: the weights of a checkpoint under the names that transformers' modules have for them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows
from qserve.checkpoint.source import ModelSource
from qserve.kernels.executor import Executor
from qserve.runtime.models.weights import Weight

_Stored = list[tuple[str, str | None]]
"""Names in the checkpoint, each with the pattern of the converter that takes it."""


class Parameters:
    """The parameters and buffers of ``model`` in ``source``, renamed and joined as transformers does it. Raises
    ``CheckpointError``, naming the tensor, where one is missing or misshapen."""

    def __init__(self, model: PreTrainedModel, source: ModelSource) -> None:
        self.source, self._model = source, model
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._packed = frozenset(f"{module}.weight" for module in source.linears())
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        state = model.state_dict()
        self._stored: dict[str, _Stored] = {}
        self._first: dict[str, str] = {}  # of the parameters that one converter makes, by each of them
        for key in sorted([*source.names(), *self._packed], key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
            self._stored.setdefault(name, []).append((key, pattern))
            if pattern is not None:
                first, *others = self._converters[pattern].target_patterns
                self._first |= {name.replace(first, other): name for other in others}
        self._made: dict[str, Tensor] = {}

    def name(self, parameter: nn.Parameter) -> str:
        """The name under which the checkpoint has ``parameter``, which may have several."""
        names = self._names[id(parameter)]
        known = [name for name in names if name in self._stored or name in self._first or self._biased(name)]
        if not known:
            raise CheckpointError(f"{self.source.name} lacks the tensor {names[0]}; is the checkpoint complete?")
        return next((name for name in known if self._is_packed(name)), known[0])

    def has(self, name: str) -> bool:
        return name in self._stored

    def _biased(self, name: str) -> bool:
        """Whether ``name`` may be the bias of a packed weight, with which it is read."""
        return name.endswith(".bias") and self._is_packed(f"{name.removesuffix('bias')}weight")

    def _is_packed(self, name: str) -> bool:
        return any(key in self._packed and pattern is None for key, pattern in self._stored.get(name, ()))

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """A parameter or buffer as it is stored; a packed one is dequantized."""
        if name not in self._stored and self._biased(name):
            bias = self._linear(f"{name.removesuffix('bias')}weight").bias
            if bias is None:
                raise CheckpointError(f"{self.source.name} lacks the tensor {name}; is the checkpoint complete?")
            return bias
        stored = self._stored.get(self._first.get(name, name), [])
        if not stored:
            raise CheckpointError(f"{self.source.name} lacks the tensor {name}; is the checkpoint complete?")
        found = self._read(stored[0][0]) if stored[0][1] is None else self._converted(name, stored)
        if tuple(found.shape) != tuple(shape):
            raise CheckpointError(
                f"{self.source.name}: {name} is {tuple(found.shape)}, the configuration says {tuple(shape)}"
            )
        return found

    def weight(self, parameter: nn.Parameter, *, transposed: bool = False) -> Weight:
        """The weight of a product, without its bias: packed if it is stored so."""
        name = self.name(parameter)
        if self._is_packed(name):
            packed = self._linear(name)
            out, inp = parameter.shape
            if (packed.out_features, packed.in_features) != ((inp, out) if transposed else (out, inp)):
                raise CheckpointError(
                    f"{self.source.name}: {name} is {packed.out_features}x{packed.in_features}, "
                    f"the configuration says {out}x{inp}"
                )
            return replace(packed, bias=None)
        found = self.tensor(name, parameter.shape)
        return (found.T if transposed else found).contiguous()

    def experts(self, parameter: nn.Parameter, *, transposed: bool = False) -> list[Weight]:
        """The weights [out, in] of the products of each expert, of a parameter [experts, …]."""
        name = self.name(parameter)
        stored = self._stored.get(name, [])
        if any(key in self._packed for key, _ in stored) and (parts := self._joined(stored)):
            return [concat_rows([self._linear(key) for key in keys]) for keys in parts]
        whole = self.tensor(name, parameter.shape)
        return [(each.T if transposed else each).contiguous() for each in whole]

    def nbytes(self, parameter: nn.Parameter, executor: Executor) -> int:
        """An upper bound of the bytes that a product or a table of ``parameter`` holds."""
        name = self.name(parameter)
        stored = self._stored.get(self._first.get(name, name), [])
        return sum(self._bytes(key, executor) for key, _ in stored)

    def _bytes(self, key: str, executor: Executor) -> int:
        if key not in self._packed:
            return self.source.nbytes(key)
        spec, module = self.source.spec, key.removesuffix(".weight")
        assert spec is not None
        scheme, (out, inp) = spec.scheme_of(module) or spec.weights, self.source.shape(module)[:2]
        return executor.packed_bytes(scheme, spec.activations_of(module), out, inp)

    def _joined(self, stored: _Stored) -> list[list[str]]:
        """For each expert the names of its parts, where all that a converter does is to join experts and their parts;
        else []."""
        pattern = stored[0][1]
        if pattern is None:
            return []
        converter = self._converters[pattern]
        simple = all(isinstance(op, MergeModulelist) or (isinstance(op, Concatenate) and op.dim == 1)
                     for op in converter.operations)  # fmt: skip
        parts = [[key for key, other in stored if other == source] for source in converter.source_patterns]
        return [list(keys) for keys in zip(*parts, strict=True)] if simple else []

    def _converted(self, name: str, stored: _Stored) -> Tensor:
        """``name`` made by its converter; the others that the same one makes wait to be asked for."""
        if name in self._made:
            return self._made.pop(name)
        first = self._first.get(name, name)
        converter = deepcopy(self._converters[str(stored[0][1])])
        for key, pattern in stored:
            converter.add_tensor(first, key, str(pattern), partial(self._read, key))  # type: ignore[arg-type]
        made = converter.convert(first, model=self._model, config=self._model.config)
        self._made |= {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        if name not in self._made:
            raise CheckpointError(f"{self.source.name} lacks the tensor {name}; is the checkpoint complete?")
        return self._made.pop(name)

    def _read(self, key: str) -> Tensor:
        if key in self._packed:
            packed = self.source.linear(key.removesuffix(".weight"))
            packed.check()
            return packed.dequantize()
        return self.source.tensor(key)

    def _linear(self, name: str) -> QuantizedWeight:
        packed = self.source.linear(self._stored[name][0][0].removesuffix(".weight"))
        packed.check()
        return packed
