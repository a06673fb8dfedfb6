import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qserve.calibration.windows import calibration_windows, evaluation_windows
from qserve.checkpoint.errors import DataError


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 40), st.integers(0, 5))
def test_calibration_windows_are_runs_that_do_not_overlap(samples, length, spare, seed):
    windows = calibration_windows(range(samples * length + spare), samples, length, seed)
    assert windows.shape == (samples, length) and windows.dtype == torch.int64
    assert bool((windows.diff(dim=1) == 1).all())
    assert len(windows.unique()) == samples * length
    assert torch.equal(windows, calibration_windows(range(samples * length + spare), samples, length, seed))


def test_seeds_differ():
    assert not torch.equal(calibration_windows(range(5000), 8, 64, 0), calibration_windows(range(5000), 8, 64, 1))


def test_too_short_says_the_numbers():
    with pytest.raises(DataError, match=r"need 65,536 tokens, the text has 1,000"):
        calibration_windows(range(1000), 128, 512, 0)
    with pytest.raises(DataError, match=r"need 1,024 tokens, the text has 1,000"):
        evaluation_windows(range(1000), 1024, 512)
    with pytest.raises(DataError, match="do not fill one window"):
        evaluation_windows(range(1000), 100, 512)


def test_evaluation_windows_are_consecutive():
    assert evaluation_windows(range(100), 25, 10).tolist() == [list(range(10)), list(range(10, 20))]
