"""The benchmark's steps return what it checks, and it notices wrong results."""

from contextlib import nullcontext

import pytest

from onchip.ops.collective_matmul.bench import JAX, RETURNED, WORLD
from onchip.ops.collective_matmul.torch_checks import session


@pytest.mark.parametrize("benchmark", [WORLD, pytest.param(JAX, marks=pytest.mark.slow)], ids=["torch", "jax"])
def test_steps(benchmark):
    with session("cpu") if benchmark is WORLD else nullcontext():
        for case, number in (("cpu-up", 0), ("cpu-down", 1)):
            problem = benchmark.make_problem(benchmark.CASES[case], "cpu", "float32")
            reference = benchmark.reference(problem)
            for mode in benchmark.MODES:
                made = benchmark.steps(problem, benchmark.IMPLEMENTATIONS[number])[mode]()
                errors = benchmark.check(reference, mode, made)
                assert list(errors) == list(RETURNED[: len(made)])
                assert all(error <= bound for error, bound in errors.values())
                wrong = [benchmark.fw.xp.roll(x, 1, 0) for x in made]
                assert all(error > 0.1 for error, _ in benchmark.check(reference, mode, wrong).values())
                assert len(benchmark.floor(problem, mode)()) == len(made)
