"""The table of methods, and how its readers treat a row that they never saw."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import QuantSpec, WeightScheme
from qserve.quantize import pipeline, rtn
from qserve.quantize.gguf_recipes import RECIPES
from qserve.quantize.job import SCHEMES, QuantizeJob
from qserve.quantize.methods import METHODS, Method, usual_method


def test_every_scheme_has_one_usual_method():
    for scheme in SCHEMES:
        (usual,) = [method for method in METHODS.values() if scheme in method.usual_for]
        assert usual_method(scheme) is usual is QuantizeJob(scheme=scheme).algorithm
    assert all(name == method.name and method.help for name, method in METHODS.items())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_method_is_refused_for_what_it_is_not_for(method: Method):
    for scheme in SCHEMES:
        inputs = "float" if scheme in ("weights", "trellis", "nvfp4a16", "mxfp4a16") else "rounded"
        only_gptq = scheme in (*RECIPES, "trellis") and method.name not in ("gptq", "rtn", "yaqa")
        zeros = scheme in ("nvfp4", "nvfp4a16", "mxfp4a16", "mxfp8") and not method.symmetric
        wanted = dict(scheme=scheme, method=method.name, symmetric=method.symmetric)
        if only_gptq or zeros:
            with pytest.raises(UsageError, match="--scheme"):
                QuantizeJob(**wanted)
        elif method.inputs in ("any", inputs) or scheme in RECIPES:
            assert QuantizeJob(**wanted).algorithm is method
        else:
            with pytest.raises(UsageError, match="--scheme"):
                QuantizeJob(**wanted)
    if method.text == "needed":
        with pytest.raises(UsageError, match="calibration text"):
            QuantizeJob(method=method.name, calibration=None, scheme="fp8" if method.inputs == "rounded" else "weights")


def test_text_that_nothing_uses_is_not_read():
    job = QuantizeJob(method="hqq", symmetric=False)
    assert job.text is None and job.tokens == 0
    assert dataclasses.replace(job, kv_cache="int8").text == dataclasses.replace(job, target_bits=5.0).text == "self"
    assert QuantizeJob(method="rtn").text == "self"


def test_a_row_is_enough_to_add_a_method(monkeypatch, llama, tmp_path):
    seen = []

    def quantize(weight, stats, scheme, *, act_order, outputs):
        seen.append((tuple(weight.shape), stats))
        return rtn.quantize(weight, None, scheme)

    row = Method("mine", help="not at all", quantize=quantize, inputs="float", instead="", text="unused")
    monkeypatch.setitem(METHODS, "mine", row)
    job = QuantizeJob(method="mine", group_size=32)
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", job)
    assert len(seen) == len(report.layers) == 14 and {stats for _, stats in seen} == {None}
    assert not any(layer.fallback for layer in report.layers)
    assert HFDirectory(tmp_path / "out").spec.method == "mine"  # a reader need not know it


def test_the_name_of_a_method_is_read_as_it_was_written_and_other_text_is_not():
    from qserve.checkpoint.formats import FORMATS

    for name, expected in (("of-next-year", "of-next-year"), ("two\nlines", "gptq"), ("", "gptq"), ("x" * 99, "gptq")):
        config = FORMATS["gptq"].config_of(QuantSpec(name, WeightScheme(4)))
        assert FORMATS["gptq"].spec_of(config).method == expected


def test_the_table_is_there_without_torch():
    """The command line asks for names and help."""
    code = "import sys; from qserve.quantize import job, methods, report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
