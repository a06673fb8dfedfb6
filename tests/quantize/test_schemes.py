import pytest

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize.job import QuantizeJob
from qserve.quantize.schemes import Shapes, assign, group_size_for


def shapes(tied=True, **linears):
    return Shapes(linears, "embed", (96, 64), tied, kept=("router",))


@pytest.mark.parametrize(
    "inp, wanted, size",
    [(576, 128, 64), (576, 64, 64), (1536, 128, 128), (96, 64, 32), (80, 64, 16), (24, 32, 8), (100, 64, -1),
     (100, -1, -1), (64, 128, 64)],
)
def test_the_largest_group_that_divides(inp, wanted, size):
    assert group_size_for(inp, wanted) == size


def test_sizes_that_do_not_fill_words_stay_dense():
    spec, notices = assign(QuantizeJob(), shapes(tied=False, a=(64, 64), b=(3, 64), c=(64, 12)))
    assert spec.ignored == ("lm_head", "b", "c", "router") and not spec.overrides
    assert len(notices) == 2 and "1 linears of 3 x 64 stay in floating point" in notices[0]
    with pytest.raises(UsageError, match="none has sizes that are multiples of 32"):
        assign(QuantizeJob(bits=3), shapes(a=(8, 64)))


def test_per_channel_is_said_in_words():
    _, notices = assign(QuantizeJob(bits=8, group_size=32), shapes(a=(64, 104), b=(64, 100)))
    assert "one scale per channel" in notices[1] and "groups of 8" in notices[0]


def test_head_and_embedding_are_explicit():
    linears = dict(a=(64, 64))
    kept, notices = assign(QuantizeJob(), shapes(**linears))
    assert "lm_head" in kept.ignored and "keeps its precision" in notices[0]
    own, notices = assign(QuantizeJob(head_bits=6), shapes(**linears))
    assert own.scheme_of("lm_head").bits == 6 and "layer of its own" in notices[0]
    shared, notices = assign(QuantizeJob(embedding_bits=8, scheme="w8a8"), shapes(**linears))
    assert shared.scheme_of("embed").bits == 8 and shared.activations_of("embed") is None
    assert shared.activations_of("a").dtype == "int8" and "stored in 8 bits" in notices[0]
    assert list(shapes(**linears).of(shared)) == ["a", "embed"]
    both, notices = assign(QuantizeJob(embedding_bits=6, head_bits=8), shapes(**linears))
    assert (both.scheme_of("embed").bits, both.scheme_of("lm_head").bits) == (6, 8)
    assert notices[0].endswith("layer of its own in 8 bits") and len(notices) == 1
    for asked, size in ((32, 32), (128, 64), (-1, 64)):
        spec, _ = assign(QuantizeJob(embedding_bits=5, group_size=asked), shapes(**linears))
        assert spec.scheme_of("embed").group_size == size
    _, notices = assign(QuantizeJob(embedding_bits=6, head_bits=6), shapes(**linears))
    assert notices[0].endswith("--embeddings 6 alone would store the same numbers once")
    with pytest.raises(UsageError, match="--embeddings must be one of 5, 6, 8, not 4"):
        QuantizeJob(embedding_bits=4)


def test_what_mixed_precision_chose_goes_before_the_job():
    chosen = {"a": WeightScheme(8, 32), "b": WeightScheme(4, 64)}
    spec, _ = assign(QuantizeJob(target_bits=5.0), shapes(a=(64, 64), b=(64, 64)), chosen)
    assert spec.scheme_of("a") == WeightScheme(8, 32) and spec.scheme_of("b") == WeightScheme(4, 64)
    assert list(spec.overrides) == ["a"]
