"""Prepared calls on a GPU that isn't there, with kernels that run: emulated_gpu.py, in a process for each."""

from pathlib import Path

import pytest

import fake_cuda


@fake_cuda.possible
@pytest.mark.parametrize(
    "call",
    [
        "cross_entropy",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (
                *("planned", "mixed", "in forward", "top-k", "dense", "linear_log_probs", "autocast"),
                *("grouped_matmul", "rows", "fp8_linear", "attention", "one projection"),
            )
        ),
    ],
)
def test_prepared_calls_give_the_same_bits(call):
    script = Path(__file__).with_name("emulated_gpu.py")
    assert fake_cuda.run(str(script), call).splitlines()[-1] == "the same bits"
