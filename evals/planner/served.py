"""``Served``: what ``qserve run`` can serve of what can be planned. A plan for anything else is for another engine."""

from __future__ import annotations

from dataclasses import dataclass

from qserve.checkpoint.families import native_families
from qserve.evals.planner.replica_roofline import Layout
from qserve.evals.planner.shape import ModelShape


@dataclass(frozen=True)
class Served:
    """``families`` are model types; ``tp`` and ``pp`` the most GPUs, of one machine, that split matrices and layers of
    one replica. The ranks of ``--pipeline-parallel-size`` are processes on CPUs, which are not planned here."""

    families: tuple[str, ...]
    tp: int = 1
    pp: int = 1

    def missing(self, shape: ModelShape, layout: Layout, kv_dtype: str = "fp16") -> tuple[str, ...]:
        """What a plan needs beyond this, in words; nothing where it is served. Latents are cached in 16 bits alone, and
        only some heads in 4."""
        found = [] if shape.family in self.families else [f"the family {shape.family}"]
        if shape.attention == "MLA" and kv_dtype != "fp16":
            found.append(f"latents in {kv_dtype}")
        elif kv_dtype == "int4_per_token_head":
            # The kernels' limits: qserve.kernels.kv_cache, and qserve.kernels.triton.support.
            found += [f"heads of {shape.score_width} in 4 bits"] if shape.score_width % 32 else []
            group = shape.num_heads // shape.kv_heads
            found += [f"{group} query heads a key head in 4 bits"] if group > 16 else []
        degrees = (("TP", layout.tp, self.tp), ("PP", layout.pp, self.pp))
        found += [f"{name} {wanted}" for name, wanted, most in degrees if wanted > most]
        if 1 < layout.tp <= self.tp:
            fewer, more = sorted((shape.kv_heads, layout.tp))
            found += [f"TP of {shape.kv_heads} key heads"] if more % fewer else []
        return tuple(found)


SERVED = Served(tuple(native_families()), tp=8)
"""What is served on GPUs today. What comes to be served is added here, and plans follow."""
