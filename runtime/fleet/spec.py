"""``FleetSpec``: what a fleet serves, as its TOML file says it. It knows no Ray and opens no model."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qserve.checkpoint.errors import UsageError
from qserve.runtime.autoscale import Autoscale

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_RULE = ("queue", "ttft", "target_ongoing_requests", "cooldown", "interval", "spare_replicas")
_OURS = ("--host", "--port", "--uds", "--api-key", "--api-keys", "--served-model-name", "--log-format", "--config",
         "--tls-cert", "--ssl-certfile", "--tls-key", "--ssl-keyfile")  # fmt: skip
MAX_REPLICAS = 10_000


@dataclass(frozen=True)
class ModelSpec:
    """One model of a fleet. Raises ``UsageError``.

    Attributes:
        name: what requests call it.
        model: what ``qserve run`` takes.
        scale: how many replicas it has; a fixed number where least and most are equal.
        cpus: processors of each replica, which are its threads too; None divides those of this machine.
        gpus: of each replica.
        options: of ``qserve run``, as ``["--max-model-len", "4096"]``.
        prefill: so many of them compute long prompts for the others.
        kv_transfer: replicas fetch KV blocks from each other.
        version: another text starts all replicas anew, as where the files of the model have changed.
    """

    name: str
    model: str
    scale: Autoscale = field(default_factory=Autoscale)
    cpus: int | None = None
    gpus: int = 0
    options: tuple[str, ...] = ()
    version: str = ""
    prefill: int = 0
    kv_transfer: bool = False

    def __post_init__(self) -> None:
        where = f"model {self.name!r:.80}"
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"{where}: a name has 1 to 128 letters, digits and . _ : / -, the first a letter or digit")
        if self.scale.max_replicas > MAX_REPLICAS:
            raise UsageError(f"{where}: max_replicas must be at most {MAX_REPLICAS}, not {self.scale.max_replicas}")
        if (self.cpus is not None and self.cpus < 1) or self.gpus < 0:
            raise UsageError(f"{where}: cpus must be at least 1, and gpus at least 0")
        fits = self.kv_transfer and not self.is_scaled and 0 < self.prefill < self.scale.min_replicas
        if self.prefill and not fits:
            raise UsageError(f"{where}: roles are {{prefill = P, decode = D}} with P and D at least 1")
        for option in self.options:
            if option.split("=")[0] in _OURS:
                raise UsageError(f"{where}: the fleet sets {option.split('=')[0]} itself; leave it out of options")

    @property
    def start(self) -> int:
        """Replicas at the start: one at least, so that a model that does not load is known at once."""
        return max(1, self.scale.min_replicas)

    @property
    def is_scaled(self) -> bool:
        return self.scale.min_replicas < self.scale.max_replicas


@dataclass(frozen=True)
class FleetSpec:
    """A fleet. Raises ``UsageError``.

    Attributes:
        models: by name.
        aliases: name → models and their weights.
        host, port: where the ingress listens, on the head of the cluster.
        routing: a policy of ``router.Router``.
        api_keys: the file of the callers' keys, on the head of the cluster.
        tls_cert, tls_key, allowed_hosts, cors_origins: as those of ``qserve run``.
    """

    models: Mapping[str, ModelSpec]
    aliases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    routing: str = "prefix-aware"
    api_keys: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.models:
            raise UsageError("a fleet needs a model: --model MODEL, or a [models.NAME] table in its file")
        if not 1 <= self.port <= 65535:
            raise UsageError(f"the port of a fleet must be 1 to 65535, not {self.port}")
        for name, weights in self.aliases.items():
            if name in self.models or not _NAME.fullmatch(name):
                raise UsageError(f"alias {name!r:.80}: it must be a name that no model has")
            if unknown := sorted(weights.keys() - self.models.keys()):
                raise UsageError(f"alias {name!r}: there is no model {unknown[0]!r:.80}")
            if not all(0 <= weight < math.inf for weight in weights.values()) or not sum(weights.values()) > 0:
                raise UsageError(f"alias {name!r}: weights must be at least 0, and one of them above it")

    @classmethod
    def read(cls, path: Path) -> FleetSpec:
        """Raises ``UsageError`` for a file that says no fleet, and ``OSError`` for one that cannot be read."""
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            return cls.of(content)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from None
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> FleetSpec:
        """From the tables of its file. Raises ``UsageError``."""
        given = dict(content)
        models = _table(given.pop("models", {}), "models")
        aliases = _table(given.pop("aliases", {}), "aliases")
        _check_types(given, _FLEET, "the fleet")
        for name in ("allowed_hosts", "cors_origins"):
            given[name] = tuple(given.get(name, ()))
        for name, weights in aliases.items():
            for weight in _table(weights, f"alias {name!r}").values():
                if isinstance(weight, bool) or not isinstance(weight, int | float):
                    raise UsageError(f"alias {name!r}: a weight is a number, not {weight!r:.40}")
        return cls(
            {name: _model(name, _table(each, f"model {name!r}")) for name, each in models.items()}, aliases, **given
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FleetSpec:
        """What ``to_json`` wrote."""
        content = json.loads(text)
        models = {
            name: ModelSpec(**each | {"scale": Autoscale(**each["scale"]), "options": tuple(each["options"])})
            for name, each in content["models"].items()
        }
        lists = {name: tuple(content[name]) for name in ("allowed_hosts", "cors_origins")}
        return cls(**content | {"models": models} | lists)


_TEXT, _NUMBER, _COUNT, _TEXTS = "a text", "a number", "an integer", "a list of texts"
_FLAG, _COUNTS = "true or false", "a table of integers"
_FLEET = {"host": _TEXT, "port": _COUNT, "routing": _TEXT, "api_keys": _TEXT, "tls_cert": _TEXT, "tls_key": _TEXT,
          "allowed_hosts": _TEXTS, "cors_origins": _TEXTS}  # fmt: skip
_MODEL = {"model": _TEXT, "replicas": _COUNT, "min_replicas": _COUNT, "max_replicas": _COUNT, "roles": _COUNTS,
          "kv_transfer": _FLAG, "cpus": _COUNT, "gpus": _COUNT, "options": _TEXTS, "version": _TEXT,
          **dict.fromkeys(_RULE, _NUMBER), "spare_replicas": _COUNT}  # fmt: skip


def _model(name: str, given: dict[str, Any]) -> ModelSpec:
    where = f"model {name!r:.80}"
    _check_types(given, _MODEL, where)
    if "model" not in given:
        raise UsageError(f"{where}: model = what qserve run takes is missing")
    if roles := given.pop("roles", {}):
        if unknown := sorted(roles.keys() - {"prefill", "decode"}):
            raise UsageError(f"{where}: there is no role {unknown[0]!r:.80}; there are prefill and decode")
        if given.keys() & {"replicas", "min_replicas", "max_replicas"}:
            raise UsageError(f"{where}: roles say how many replicas there are; leave out replicas")
        given |= {"replicas": roles.get("prefill", 0) + roles.get("decode", 0), "kv_transfer": True}
    if ("replicas" in given) == ("max_replicas" in given or "min_replicas" in given):
        if "replicas" in given:
            raise UsageError(f"{where}: give replicas, or min_replicas and max_replicas, not both")
        given["replicas"] = 1
    fixed = given.pop("replicas", 1)
    limits = given.pop("min_replicas", fixed), given.pop("max_replicas", fixed)
    rule = {key: given.pop(key) for key in _RULE if key in given}
    if rule and limits[0] == limits[1]:
        raise UsageError(f"{where}: {next(iter(rule))} needs min_replicas below max_replicas")
    try:
        scale = Autoscale(*limits, **rule)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    options = tuple(given.pop("options", ()))
    return ModelSpec(name, scale=scale, prefill=roles.get("prefill", 0), options=options, **given)


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be a table, not {value!r:.40}")
    return dict(value)


def _check_types(given: Mapping[str, Any], kinds: Mapping[str, str], where: str) -> None:
    for name, value in given.items():
        if name not in kinds:
            raise UsageError(f"{where}: there is no field {name!r:.80}; there are {', '.join(sorted(kinds))}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {
            _TEXT: isinstance(value, str),
            _NUMBER: is_number,
            _COUNT: is_number and isinstance(value, int),
            _FLAG: isinstance(value, bool),
            _COUNTS: isinstance(value, dict) and all(type(each) is int and each >= 0 for each in value.values()),
            _TEXTS: isinstance(value, list) and all(isinstance(each, str) for each in value),
        }
        if not fits[kinds[name]]:
            raise UsageError(f"{where}: {name} is {kinds[name]}, not {value!r:.40}")
