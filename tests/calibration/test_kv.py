"""Keys and values as attention gets them, against what transformers puts into its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qserve.calibration.blocks import walk
from qserve.calibration.kv import KVRecorder, cached
from qserve.calibration.skeleton import Skeleton
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import open_model


def test_recorded_is_what_the_cache_holds(family: str, saved_model: Callable[[str], Path], tokens: torch.Tensor
) -> None:  # fmt: skip
    path = saved_model(family)
    tokens = tokens[:, :7]  # a sliding window of 8 keeps no more
    with torch.no_grad():
        cache = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).past_key_values
    skeleton = Skeleton(open_model(path))
    for visit in walk(skeleton, tokens, samples_at_once=2):
        with KVRecorder(visit.block) as recorder:
            visit.finish()
        if recorder.is_recurrent:
            assert family in ("qwen3_next", "qwen3_5_text") and visit.index == 0
            continue
        if family == "falcon":  # its attention is not one that transformers lets others take the place of
            with pytest.raises(UsageError, match="FalconDecoderLayer cannot be observed"):
                recorder.absmax()
            continue
        keys, values = recorder.absmax()
        layer = cache.layers[visit.index]
        torch.testing.assert_close(keys, layer.keys.abs().amax(dim=(0, 2, 3)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, layer.values.abs().amax(dim=(0, 2, 3)), atol=1e-4, rtol=1e-4)
        mean = layer.keys.mean(dim=(0, 2))
        torch.testing.assert_close(recorder.key_mean(), mean, atol=1e-4, rtol=1e-4)
        spread = (layer.keys - mean[:, None]).abs().amax(dim=(0, 2, 3))
        torch.testing.assert_close(recorder.key_spread(), spread, atol=1e-4, rtol=1e-4)
        assert len(keys) == (4 if family in ("opt", "gpt_neox", "gpt2") else 2)
        assert recorder.attention == {"gpt_neox": "attention", "gpt2": "attn"}.get(family, "self_attn")
    assert not {"sdpa", "eager"} & ALL_ATTENTION_FUNCTIONS._local_mapping.keys()


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # SDPA, and eager for the soft cap
def test_attention_goes_on_with_changed_values(family: str, saved_model: Callable[[str], Path], tokens: torch.Tensor
) -> None:  # fmt: skip
    visit = next(walk(Skeleton(open_model(saved_model(family))), tokens))
    plain = torch.cat([part for _, part in visit.forward()])
    with cached(visit.block, lambda module, keys, values: (keys, values)):
        same = torch.cat([part for _, part in visit.forward()])
    with cached(visit.block, lambda module, keys, values: (keys, torch.zeros_like(values))):
        changed = torch.cat([part for _, part in visit.forward()])
        with cached(nn.Linear(2, 2), lambda module, keys, values: (keys * 2, values)):  # the attention of others
            nested = torch.cat([part for _, part in visit.forward()])
    assert torch.equal(same, plain) and torch.equal(nested, changed)
    assert float((changed - plain).abs().max()) > 0.01
    assert torch.equal(torch.cat([part for _, part in visit.forward()]), plain)


def test_a_block_without_known_attention_cannot_be_observed() -> None:
    block = nn.Sequential(nn.Linear(4, 4))
    with KVRecorder(block) as recorder:
        block(torch.ones(1, 4))
    with pytest.raises(UsageError, match="Sequential cannot be observed"):
        recorder.absmax()
