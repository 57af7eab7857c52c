"""Soft labels on the 'mosaic_gpu' backend without a GPU: with plain stand-ins for its kernels, and lowered for CUDA."""

import plain_kernels
import pytest
from soft_cases import CASES, assert_right


@pytest.fixture
def on_the_cpu(monkeypatch):
    plain_kernels.stand_in(monkeypatch)
    yield
    plain_kernels.forget()


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=str)
def test_values(number, case, on_the_cpu):
    half, layout = ("bfloat16", "float16")[number % 2], ("vh", "hv")[number // 2 % 2]
    assert_right(case, half, layout if case.vocab % 64 == 0 else "vh", backend="mosaic_gpu")
