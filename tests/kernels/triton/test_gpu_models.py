"""Small random models of every native family on a GPU: nothing is left to the reference, and the logits
are the reference's.

``pytest -m gpu``. ``test_families.py`` runs some of them in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qserve.checkpoint.hf import HFDirectory
from qserve.kernels.executor import Executor
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.target import is_interpreted
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder
from tests.kernels.triton.test_families import DENSE, LIMITS
from tests.kernels.triton.test_gpu_engine import DEVICE
from tests.runtime import test_delta_net
from tests.runtime.models import test_decoder, test_latent, test_moe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(is_interpreted(), reason="no GPU is visible")]
TOLERANCE = 1e-2
ODD = {"gpt_neo-odd", "opt-odd"}
"""Their heads have 9 numbers, for which there is no kernel."""

MAKERS: dict[str, Callable[[Path, Path], object]] = {
    **{case: lambda _, path, case=case: test_decoder.save_random(*DENSE[case], path) for case in DENSE},
    **{case: lambda _, path, case=case: test_moe.make(case).save_pretrained(path) for case in test_moe.CASES},
    **{case: lambda _, path, case=case: test_latent.make(case, path) for case in test_latent.CASES},
    **{case: lambda tiny, path, case=case: test_delta_net.save_hybrid(tiny, path, case)
       for case in test_delta_net.CASES},
}  # type: ignore[misc]  # fmt: skip


def logits(path: Path, executor: Executor) -> torch.Tensor:
    """[15, vocab]: a prompt of 11 tokens and four decodes, the last ones from a graph."""
    source = HFDirectory(path)
    decoder = Decoder(source, decoder_config(source.config, "small"), executor, LIMITS, kv_dtype=torch.float16)
    assert not decoder.fallbacks
    tokens = torch.randint(0, 80, (15,), generator=torch.Generator().manual_seed(7)).tolist()
    return test_decoder.run_chunks(decoder, tokens, [11, 1, 1, 1, 1]).float().cpu()


@pytest.mark.parametrize("case", [case for case in MAKERS if case not in ODD])
def test_logits_are_those_of_the_reference(case: str, tiny_model: Path, tmp_path: Path) -> None:
    MAKERS[case](tiny_model, tmp_path)
    got, want = logits(tmp_path, TritonExecutor(DEVICE, torch.float16)), logits(tmp_path, ReferenceExecutor())
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    # The median: in 16 bits a token may choose other experts, and those that see it differ, too.
    assert errors.median() < TOLERANCE, errors
