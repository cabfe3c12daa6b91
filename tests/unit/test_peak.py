"""The peak of this machine's CPU."""

import pytest
import torch

from rayjob.training.peak import peak_of


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_peak_of_a_cpu_is_measured_and_says_so(precision: torch.dtype) -> None:
    peak = peak_of(torch.device("cpu"), precision)
    assert peak is not None
    assert peak.basis.startswith("measured")
    # 1 GFLOPS would be slower than any CPU of this century, 100 TFLOPS faster than any.
    assert 1e-3 < peak.tflops < 100
