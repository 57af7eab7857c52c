"""How JAX's steps are measured."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pynvml
import pytest

from onchip.bench import environment, jax_steps


def test_memory_is_what_xla_has_planned() -> None:
    x = jnp.ones((2048, 512))
    step = jax_steps.JaxStep(lambda x: [jnp.tanh(x @ x.T) @ x], (x,))  # the inner product has 16 MiB
    extra = jax_steps.peak_extra_bytes(step, device="cpu")
    assert extra == step.compilation[0].memory_analysis().temp_size_in_bytes
    assert 16 << 20 <= extra < 36 << 20
    assert 0 < jax_steps.beside(step, "cpu")["compile_s"] < 60


def test_time_is_until_the_results_are_there() -> None:
    x = jnp.ones((1024, 1024))
    long = jax_steps.JaxStep(lambda x: [jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 1024, x)], (x,))
    short = jax_steps.JaxStep(lambda x: [x + 1], (x,))
    timings = jax_steps.time_interleaved({"long": long, "short": short}, device="cpu", repeats=2)
    assert timings["long"].median_ms > 3 * timings["short"].median_ms > 0


def test_steps_of_a_gpu_run_in_a_row() -> None:
    for milliseconds, device, times in ((2, "cpu", 1), (2, "cuda", 1 + 15), (40, "cuda", 1 + 3)):
        calls: list[int] = []

        def step(milliseconds: int = milliseconds, calls: list[int] = calls) -> list[int]:
            time.sleep(milliseconds / 1e3)
            calls.append(1)
            return calls

        assert jax_steps.time_once(step, device) >= milliseconds
        assert min(2, times) <= len(calls) <= times  # fewer on a busy machine


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 13010")
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", client=client)
    monkeypatch.setattr(jax, "devices", lambda *platform: [device])
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(total=81559 << 20))
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    assert environment.device_slug("cuda", "jax") == "h100"
    described = environment._gpu("jax")
    assert (described["driver"], described["gpu_bytes"], described["cuda"]) == ("580.1", 81559 << 20, "13.1")
