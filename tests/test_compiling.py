"""A process of its own compiles kernels before the first one is launched."""

import gc
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITCallable

from onchip.kernels.triton import compiling, tiles
from onchip.kernels.triton.compile_process import Job, dumps
from onchip.kernels.triton.keys import settle
from onchip.kernels.triton.launch import Launch, interpreted
from onchip.vocab.triton import staggered, vectors

pytestmark = pytest.mark.skipif(interpreted(), reason="kernels are compiled")


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """Triton compiles for a GPU that isn't there, into an empty cache."""

    def device(_=None):
        return 0

    active = SimpleNamespace(
        get_current_device=device, get_current_stream=device, get_current_target=lambda: GPUTarget("cuda", 90, 32)
    )
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def launches():
    vectors_of_ids = {
        x: torch.zeros(8, dtype=torch.int32) for x in ("label", "number", "sorted_label", "sorted_position")
    }
    same = {**vectors_of_ids, "N": 8, "sorts": 1, "BLOCK": 32, "OTHERS": 64}
    return [Launch(vectors.sort_labels, (1,), {**same, "IDS": ids}) for ids in (1, 2)]


def forget():
    vectors.sort_labels.device_caches.clear()


def test_a_process_fills_the_cache(hopper, monkeypatch):
    monkeypatch.setattr(compiling, "_compile_in_threads", pytest.fail)
    asked = [x.ask for x in launches()]
    with compiling.told() as told:
        compiling.compile_all(asked)
    assert told == (["sort_labels"] * 2, [])
    assert [x.asm["cubin"] is not None for x in (ask() for ask in asked)] == [True, True]
    forget()
    monkeypatch.setattr(compiling, "_Process", pytest.fail)  # now there is nothing to compile
    with compiling.told() as told:
        compiling.compile_all(asked)
    assert told == ([], ["sort_labels"] * 2)


def test_threads_compile_what_a_process_could_not(hopper, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(hopper / "no python"))
    asked = [x.ask for x in launches()]
    compiling.compile_all(asked)
    assert compiling._looked_up(asked).missing == []


def test_threads_parse_in_turns(monkeypatch):
    """CPython 3.11 and 3.12 count the depth of all threads together, and raise where two parse at once."""
    inside, met = [], []

    def make_ir():
        inside.append(1)
        time.sleep(0.01)
        met.append(len(inside))
        inside.pop()

    jobs = [Job(SimpleNamespace(make_ir=make_ir), *[None] * 3) for _ in range(4)]
    monkeypatch.setattr(compiling, "compile_one", lambda job: job.source.make_ir())
    compiling._compile_in_threads([compiling._Missing("", False, None, x) for x in jobs])
    assert met == [1] * 4


def test_what_cannot_be_compiled_says_why(hopper):
    bad = Launch(vectors.sort_labels, (1,), {**launches()[0].given, "BLOCK": 100})
    with pytest.raises(Exception, match="arange's range must be a power of 2"):
        compiling.compile_all([bad.ask])


def test_only_a_kernel_that_no_process_compiled_asks_what_is_coming(hopper):
    first, second = (x.ask for x in launches())
    asked = []

    def others():
        asked.append(1)
        return [second]

    compiling.compile_coming(first, others)
    assert asked == [1]
    forget()
    compiling.compile_coming(first, others)
    compiling.compile_coming(second, others)
    assert asked == [1]


def kernels(*modules):
    return [x for module in modules for x in vars(module).values() if isinstance(x, JITCallable)]


def test_keys_do_not_depend_on_the_order(monkeypatch):
    """Triton's own ones do: a kernel's has its callees' globals only if these were hashed before."""
    several = kernels(staggered, vectors, tiles)
    found = []
    for order in (several, several[::-1]):
        for x in every_function():
            monkeypatch.setattr(x, "hash", None)
        for x in order:
            settle(x)
        found.append({x.__name__: x.cache_key for x in several})
    assert found[0] == found[1]


def every_function():
    modules = [x for name, x in sys.modules.items() if name.startswith("onchip.") and x is not None]
    return {id(x): x for x in kernels(*modules)}.values()


def test_the_process_needs_no_torch(hopper):
    """Nor do the kernels' modules, or it would take seconds to begin."""
    with compiling._Process() as process:
        found = compiling._looked_up([x.ask for x in launches()]).missing
        assert process.started is not None
    sent = dumps([x.job for x in found])
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); assert 'torch' not in sys.modules"
    path = str(Path(compiling.__file__).parents[3])
    subprocess.run([sys.executable, "-c", code], input=sent, check=True, env={"PYTHONPATH": path})
    assert isinstance(found[0].job, Job)


def test_no_tensor_is_kept_of_what_was_compiled(hopper):
    gc.collect()
    gc.disable()
    try:
        made = launches()
        kept = [weakref.ref(x) for x in made[0].given.values() if isinstance(x, torch.Tensor)]
        asked = [x.ask for x in made]
        compiling.compile_coming(asked[0], partial(list, asked))
        del made, asked
        assert kept
        assert not any(x() is not None for x in kept)
    finally:
        gc.enable()
