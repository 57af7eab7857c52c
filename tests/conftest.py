import os
import sys
from types import ModuleType

import pytest
import torch

from on_hopper import as_on_hopper, on_the_cpu  # noqa: F401  fixtures
from onchip.frontend import torch_prepared

# JAX would take three quarters of a GPU's memory at once, which PyTorch's tests and other processes need too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# The process's peak memory is measured with malloc's free blocks out of the way.  What JAX compiles leaves millions of
# those: after its tests a measurement took up to 20 s.  So these go first.
MEASURE_MEMORY = (
    "test_losses_memory.py",
    "test_measure.py",
    "test_bench.py",
    "test_bench_ops.py",
    "test_jsd_torch.py",
    "test_demo.py",
)


# Of the others what takes longest goes first, so that one worker doesn't end with it alone.
LONGEST = ("test_bench_losses.py", "test_compiled.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.path.name.endswith(LONGEST))
    items.sort(key=lambda item: not item.path.name.endswith(MEASURE_MEMORY))


@pytest.fixture(autouse=True)
def seed():
    """Tests that draw their own numbers draw the same ones every time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def free_gpu_memory(request):
    """What a big test had on the GPU is there for other processes' tests, and plans that it patched are forgotten."""
    yield
    torch_prepared.forget()
    if request.node.get_closest_marker("gpu") and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture
def unwritten_memory_shows():
    """As NaN."""
    from losses import nan_filled

    with nan_filled():
        yield


@pytest.fixture
def one_thread():
    """On a busy machine, threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def stand_in(monkeypatch):
    """Put a module with these names in a library's place, and the packages that it is in; gives the module."""

    def put(name, names=()):
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            above = ".".join(parts[:n])
            if n == len(parts) or not isinstance(sys.modules.get(above), StandIn):
                monkeypatch.setitem(sys.modules, above, StandIn(above))
        vars(sys.modules[name]).update(names)
        return sys.modules[name]

    return put


class StandIn(ModuleType):
    pass


@pytest.fixture
def quiet_bench(monkeypatch):
    """Without the page, which takes longer than all else, and without a look at what else is running."""
    monkeypatch.setattr("onchip.bench.run.html_page", lambda document, name: "")
    monkeypatch.setattr("onchip.bench.environment._busy_cores", lambda: 0.0)
