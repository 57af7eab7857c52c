"""How Triton's kernels are launched, on a GPU that isn't there: they are compiled, and launches are recorded."""

import re
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.kernels.triton import launch, versions
from onchip.kernels.triton.launch import SPILLED, Launch, Shared, trait


class Pair(NamedTuple):
    x: object
    n: object


class Other(NamedTuple):
    x: object
    n: object


def _numbers(dtype):
    return torch.zeros(65, dtype=dtype)


MATRIX = torch.zeros(64, 64, dtype=torch.bfloat16)
TENSORS = [
    x for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8)
    for x in (_numbers(dtype), _numbers(dtype)[1:], _numbers(dtype)[16:], torch.nn.Parameter(_numbers(dtype), False))
]  # fmt: skip
NUMBERS = [0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), 2**63 - 1, 2**63, 2**64 - 16]
VALUES = [*TENSORS, *NUMBERS, True, False, None, 1.0, 16.0, 0.5]
DESCRIPTORS = [
    TensorDescriptor(x, [64, 64], [64, 1], block)
    for x in (MATRIX, MATRIX.half(), MATRIX.float())
    for block in ([64, 64], [64, 32], [32, 64])
]
PAIRS = [kind(x, n) for kind in (Pair, Other) for x in (TENSORS[0], TENSORS[1], None) for n in (1, 2, 16, 17, None)]


def test_equal_traits_mean_equal_machine_code():
    found = {}
    for x in (*VALUES, *DESCRIPTORS, *PAIRS):
        compiled_for = native_specialize_impl(BaseBackend, x, False, True, True)
        assert found.setdefault(trait(x), compiled_for) == compiled_for, (x, trait(x))


def test_traits_do_not_change_with_what_does_not_matter():
    assert trait(15) == trait(17)
    assert trait(_numbers(torch.int32)) == trait(torch.ones(3).int())


PAIR = Pair(TENSORS[0], 3)


class Driver:
    """Of a Hopper that notes down what it would run."""

    def __init__(self):
        self.device, self.loaded, self.launched, self.utils = 0, 0, [], self
        self.spilled = 0  # words of a thread

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 10 + device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def load_binary(self, *_):
        self.loaded += 1
        return 1, self.loaded, 32, self.spilled, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launched.append(arguments)


@triton.jit
def add(out, pair, n, bias, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(pair.x + at, mask=at < n)
    if bias is not None:
        x += tl.load(bias + at, mask=at < n)
    tl.store(out + at, x + pair.n, mask=at < n)


def forget():
    """What was tried on another device than this, or would be tried there."""
    versions.direct_refusal.cache_clear()
    launch._triton.cache_clear()


@pytest.fixture(scope="module")
def gpu():
    with mock.patch.object(driver, "_active", Driver()) as made:
        forget()
        assert versions.direct_refusal() is None
        yield made
    forget()


@pytest.fixture(autouse=True)
def first_device(gpu):
    gpu.device = gpu.spilled = 0


def launched(gpu, *, bias=None, n=17, out=TENSORS[0], size=64, pair=PAIR, warps=4):
    """How often Triton launched it, having looked for its kernel itself, and what it ran."""
    made = Launch(add, (2, 3), {"out": out, "n": n, "SIZE": size}, warps, shared=Shared({"pair": pair, "bias": bias}))
    with mock.patch.object(type(add), "run", autospec=True, side_effect=type(add).run) as looked:
        made.run()
    return sum(not call.kwargs["warmup"] for call in looked.call_args_list), gpu.launched[-1]


def test_what_was_compiled_is_called_directly_with_the_same_arguments(gpu):
    (first, by_triton), (again, direct) = launched(gpu), launched(gpu)
    assert (first, again) == (1, 0)
    assert direct[:6] == by_triton[:6] == (2, 3, 1, 10, *by_triton[4:6])
    hooks, arguments = direct[6:9], direct[9:]
    assert hooks == (None, None, None)
    assert all(a is b for a, b in zip(arguments, by_triton[9:], strict=True))
    assert launched(gpu, n=33)[0] == 0  # another number of the same traits
    assert launched(gpu, out=_numbers(torch.float32))[0] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"out": TENSORS[0][1:]}, {"out": TENSORS[0].bfloat16()}, {"n": 1}, {"n": 16}, {"n": 2**40 + 1}, {"size": 32},
        {"bias": TENSORS[0]}, {"pair": Pair(TENSORS[0], 1)}, {"pair": Pair(TENSORS[0][1:], 3)}, {"warps": 8},
    ],
    ids=["unaligned", "dtype", "1", "16", "64 bits", "constant", "not None", "1 inside", "unaligned inside", "warps"],
)  # fmt: skip
def test_what_is_compiled_for_is_looked_up(gpu, change):
    usual = launched(gpu)[1][4]
    looked, ran = launched(gpu, **change)
    assert looked == 1
    assert ran[4] != usual
    assert launched(gpu, **change) == (0, gpu.launched[-1])
    assert gpu.launched[-1][4] == ran[4]


def test_again_has_the_changes_and_all_else(gpu):
    launched(gpu)
    given = {"out": TENSORS[0], "n": 17, "SIZE": 64}
    first = Launch(add, (2, 3), given, shared=Shared({"pair": PAIR, "bias": None})).fixed()
    first.again(n=33).run()
    assert first.again(n=33).arguments == first.arguments | {"n": 33}
    assert launched(gpu, n=33)[1] == gpu.launched[-2]


def test_another_device_has_machine_code_of_its_own(gpu):
    launched(gpu)
    gpu.device = 1
    looked, ran = launched(gpu)
    assert (looked, ran[3]) == (1, 11)


@pytest.mark.parametrize("change", ["hook", "debug", "before", "version"])
def test_what_is_done_around_a_launch_is_left_to_triton(gpu, monkeypatch, change):
    launched(gpu)
    seen = []
    if change == "hook":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [seen.append])
    elif change == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    elif change == "before":
        monkeypatch.setattr(add, "pre_run_hooks", [lambda *_, **__: None])
    else:
        monkeypatch.setattr("onchip.kernels.triton.launch._triton", lambda: None)
    assert launched(gpu)[0] == 1


class OtherKernel:
    """As a Triton that has changed would call what it compiled."""

    def __getitem__(self, grid):
        return lambda **arguments: self._do_compile().run(*grid, *arguments.values())


class ChangedKernel:
    def __getitem__(self, grid):
        raise AttributeError("launch")


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(OtherKernel, "Triton passes other arguments to what it compiled"), (ChangedKernel, "AttributeError: launch")],
)
def test_a_launch_that_is_another_one_is_left_to_triton(gpu, monkeypatch, kernel, why):
    launched(gpu)
    monkeypatch.setattr(triton, "jit", lambda function: kernel())
    assert versions.direct_refusal.__wrapped__() == why
    monkeypatch.setattr(launch, "direct_refusal", lambda: why)
    monkeypatch.setattr(launch, "_triton", launch._triton.__wrapped__)
    assert launched(gpu)[0] == 1


def test_kernels_in_gluon_are_tried(monkeypatch):
    assert versions.gluon_refusal() is None

    def changed():
        raise RuntimeError("at 3:4") from AttributeError("no mbarrier")

    monkeypatch.setattr("onchip.kernels.triton.trial.compile_for_hopper", changed)
    assert versions.gluon_refusal.__wrapped__() == "AttributeError: no mbarrier"
    monkeypatch.setattr(launch, "gluon_refusal", versions.gluon_refusal.__wrapped__)
    assert not launch.has_gluon(90)


@pytest.mark.parametrize(("words", "much"), [(SPILLED // 4, False), (SPILLED // 4 + 1, True)])
def test_what_a_kernel_spills_is_known_before_it_is_launched(gpu, words, much):
    gpu.spilled, before = words, len(gpu.launched)
    given = {"out": TENSORS[0], "pair": PAIR, "bias": None, "n": 17, "SIZE": 128 if much else 256}
    made = Launch(add, (2, 3), given)
    assert made.spills() == made.spills() == much
    assert len(gpu.launched) == before
    made.run()
    assert len(gpu.launched) == before + 1


def test_no_version_is_compared_as_text():
    source = Path(launch.__file__).parents[2]
    for file in source.rglob("*.py"):
        assert not re.search(r"__version__\.(startswith|split)", file.read_text()), file
