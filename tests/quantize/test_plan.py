import pytest

from qserve.checkpoint.errors import UsageError
from qserve.quantize.job import QuantizeJob
from qserve.quantize.plan import group_size_for, plan


@pytest.mark.parametrize(
    "inp, wanted, size",
    [(576, 128, 64), (576, 64, 64), (1536, 128, 128), (96, 64, 32), (80, 64, 16), (24, 32, 8), (100, 64, -1),
     (100, -1, -1), (64, 128, 64)],
)
def test_the_largest_group_that_divides(inp, wanted, size):
    assert group_size_for(inp, wanted) == size


def test_sizes_that_do_not_fill_words_stay_dense():
    spec, notices = plan(QuantizeJob(), {"a": (64, 64), "b": (3, 64), "c": (64, 12)})
    assert spec.ignored == ("lm_head", "b", "c") and not spec.overrides
    assert len(notices) == 2 and "1 linears of 3 x 64 stay in floating point" in notices[0]
    with pytest.raises(UsageError, match="none has sizes that are multiples of 32"):
        plan(QuantizeJob(bits=3), {"a": (8, 64)})


def test_per_channel_is_said_in_words():
    _, notices = plan(QuantizeJob(bits=8, group_size=32), {"a": (64, 104), "b": (64, 100)})
    assert "one scale per channel" in notices[1] and "groups of 8" in notices[0]
