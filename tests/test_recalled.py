"""A filled cache is found by a key that needs neither Triton's hash of itself nor its parser."""

import inspect
import pickle
import sys
from types import ModuleType

import pytest
import torch
import triton
from triton import language as tl

import onchip.torch
from onchip.attention.triton import portable_launches
from onchip.groups.triton import launches as grouped
from onchip.kernels.triton import compiling, recalled, trial
from onchip.kernels.triton.compile_process import Job, dumps
from onchip.kernels.triton.launch import Launch, interpreted
from onchip.vocab.triton import walks
from test_compiling import every_function, forget, hopper, launches  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(interpreted(), reason="kernels are compiled")

ADDED, PARTS = tl.constexpr(3), (tl.constexpr(1), tl.float32)


@triton.jit
def inner(x):
    return x + ADDED


@triton.jit
def other(x):
    return x - ADDED


class Some:
    of = inner


@triton.jit
def outer(x, N: tl.constexpr, also: tl.constexpr = inner):
    tl.store(x, inner(N + PARTS[0]) + Some.of(N))


@triton.jit
def added(x):
    tl.store(x, ADDED)


@pytest.fixture
def filled(hopper, monkeypatch):  # noqa: F811
    """A cache that another process filled; Triton's own key would raise."""
    for function in every_function():
        if not inspect.isclass(function):
            monkeypatch.setattr(function, "hash", None)  # which another test may have asked for: nothing is noted then
    compiling.compile_all([x.ask for x in launches()])
    forget()

    def settle(kernel):
        raise LookupError("Triton's way")

    monkeypatch.setattr(recalled, "settle", settle)


def test_what_another_process_compiled_is_found(filled):
    with compiling.told() as told:
        compiling.compile_all([x.ask for x in launches()])
    assert told == ([], ["sort_labels"] * 2)
    assert [x.ask().asm["cubin"] is not None for x in launches()] == [True, True]
    assert recalled.noted_any()


@pytest.mark.parametrize("change", ["triton", "assembler", "environment", "watched", "gone"])
def test_it_is_asked_for_anew_where_anything_differs(filled, hopper, monkeypatch, change):  # noqa: F811
    if change == "triton":
        monkeypatch.setattr(recalled, "_installed", lambda: "other files")
    elif change == "assembler":
        monkeypatch.setenv("TRITON_PTXAS_PATH", sys.executable)
    elif change == "environment":
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    elif change == "watched":
        monkeypatch.setattr(triton.knobs.compilation, "listener", print)
    else:
        for x in hopper.rglob("*.cubin"):
            x.unlink()
    with pytest.raises(LookupError, match="Triton's way"):
        launches()[0].ask()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ADDED", tl.constexpr(4)),
        ("inner", other),
        ("PARTS", (tl.constexpr(1), tl.float16)),
        ("PARTS", (1, tl.float32)),
    ],
)
def test_a_key_has_all_that_a_kernel_names(monkeypatch, name, value):
    before = recalled.hash_source(outer, {})
    assert recalled.hash_source(outer, {}) == before
    monkeypatch.setitem(globals(), name, value)
    assert recalled.hash_source(outer, {}) != before


def test_a_key_has_what_is_found_in_classes_and_modules_and_as_defaults(monkeypatch):
    before = recalled.hash_source(outer, {})
    monkeypatch.setattr(Some, "of", other)
    in_class = recalled.hash_source(outer, {})
    monkeypatch.setattr(outer.fn, "__defaults__", (other,))
    as_default = recalled.hash_source(outer, {})
    outside, inside = ModuleType("outside"), ModuleType("inside")
    outside.of, inside.of = inside, other
    monkeypatch.setitem(globals(), "Some", outside)
    in_modules = recalled.hash_source(outer, {})
    inside.of = inner
    assert len({before, in_class, as_default, in_modules, recalled.hash_source(outer, {})}) == 5


def test_a_key_has_a_source_that_was_updated(monkeypatch):
    before = recalled.hash_source(outer, {})
    monkeypatch.setattr(inner, "_src", inner.src.replace("+", "-"))
    assert recalled.hash_source(outer, {}) != before


def test_what_triton_found_for_a_global_as_it_was_is_not_noted(hopper, monkeypatch):  # noqa: F811
    """Triton hashes a function once, and so finds the kernel of the old value; it raises only where it launches."""

    def ask():
        added.device_caches.clear()
        return Launch(added, (1,), {"x": torch.zeros(1, dtype=torch.int32)}).ask()

    def in_a_new_process():
        added.hash, added.used_global_vals = None, {}
        return ask().asm["ptx"]

    try:
        old = in_a_new_process()
        monkeypatch.setitem(globals(), "ADDED", tl.constexpr(4))
        with pytest.raises(RuntimeError, match="has changed"):
            ask()
        new = in_a_new_process()
        assert old.replace(", 3;", ", 4;") == new != old
        monkeypatch.setattr(recalled, "settle", pytest.fail)  # from here on all is found
        assert in_a_new_process() == new
    finally:
        added.device_caches.clear()


def test_a_process_compiles_no_kernel_that_was_changed_here(monkeypatch):
    """It would compile what is in the file, for the key of what is here."""
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "ADDED", tl.constexpr(4))
        jobs = dumps([Job(added, None, {}, None)])
        assert pickle.loads(jobs)[0][0] is added
    with pytest.raises(LookupError, match="is another one here"):
        pickle.loads(jobs)


def test_what_has_no_lasting_name_is_in_no_key(monkeypatch):
    for value in (object(), (object(),), tl.constexpr(object()), [outer]):
        monkeypatch.setitem(globals(), "ADDED", value)
        with pytest.raises(recalled.Nameless):
            recalled.hash_source(outer, {})
        with pytest.raises(pickle.PicklingError):
            dumps([Job(outer, None, {}, None)])


def test_all_kernels_have_a_key():
    assert all((onchip.torch, portable_launches, grouped, trial, walks))  # are imported
    several = [x for x in every_function() if not inspect.isclass(x)]
    assert len({recalled.hash_source(x, {}) for x in several}) == len(several) > 100
