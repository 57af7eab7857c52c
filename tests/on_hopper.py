"""Fixtures for JAX's kernels without a GPU; they need no PyTorch."""

import pytest


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Losses of heads run on the 'mosaic_gpu' backend, with stand-ins for its kernels."""
    import plain_kernels

    plain_kernels.stand_in(monkeypatch)
    yield
    plain_kernels.forget()


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Losses of heads lower for a GPU that isn't there."""
    import plain_kernels

    plain_kernels.on_a_gpu(monkeypatch)
    plain_kernels.forget()  # plans of other tests
    yield
    plain_kernels.forget()
