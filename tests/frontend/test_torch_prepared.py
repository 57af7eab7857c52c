"""What functions state and what prepared calls do, on the CPU with made-up launches; test_prepared_gpu.py has the
ops.
"""

import ast
import re
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import onchip
from onchip.frontend import torch_builder
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_builder import Builder, Prepared
from onchip.frontend.torch_prepared import Kinds, builder


@pytest.fixture(autouse=True)
def as_the_cpus_memory_is(monkeypatch):
    monkeypatch.setattr(torch_builder, "ALIGNED", 64)


class Arguments:
    """As a packed launch has them; to send them notes them down."""

    def __init__(self, log, values):
        self.log, self.written, self.words, self.stream = log, None, {}, "stream"
        self.given = SimpleNamespace(tensors=[], descriptors=[], tuples=[])
        self.there = self.add(values)

    def add(self, x):
        """What tells what there is of it when it is sent."""
        if isinstance(x, tuple):
            parts, new = [self.add(y) for y in x], []
            self.given.tuples.append((x, new.append))
            return lambda: new[-1] if new else tuple([part() for part in parts])
        if isinstance(x, torch.Tensor):
            self.given.tensors.append((x, place := len(self.given.tensors)))
            return lambda: self.words.get(place, 0)
        if isinstance(x, Descriptor):
            put, word = [], x.word
            self.given.descriptors.append((x, SimpleNamespace(put=lambda *given: put.append(given), word=word)))
            return lambda: put[-1] if put else self.words[word]
        return lambda: x

    def send(self):
        self.log.append((self.words["stream"], self.there()))


class Log(list):
    """Launches."""

    def launch(self, *values):
        told = builder()
        if told is not None:
            told.require(lambda: True, lambda: "stream")
            told.launch(Arguments(self, values))
        return values

    @property
    def values(self):
        return [values for _, values in self]


def prepared(function, *tensors):
    with Builder(tensors) as told:
        results = function(*tensors)
    made = told.finish(results)
    assert isinstance(made, Prepared), made
    return lambda *given: made.run(given)


CPU = torch.device("cpu")


def _operators(x, w):
    """Views, other dtypes, operators in place, with several results, and with a result that is an argument's memory."""
    z = stated.zeros((4, 3), torch.float32, CPU)
    stated.call(torch.Tensor.add_, z.view(-1)[:6].view(2, 3), stated.call(torch.mul, w[:2], 2))
    copy = stated.empty((5, 2), torch.float32, CPU)
    stated.call(torch.Tensor.copy_, copy, stated.converted(x, lambda x: x.reshape(-1)[:10].view(5, 2)))
    values, indices = stated.call(torch.sort, stated.call(torch.mul, x, 3), dim=1)
    row = stated.zeros(16, torch.uint8, CPU)
    stated.call(torch.Tensor.add_, row.view(torch.float32), x[0, 0])
    part = stated.zero(stated.call(torch.clone, x)[1:])
    return [row.view(torch.int32), w.T, z, None, copy.view(torch.int32)[1:], values.T, indices, w[1:], part]


def _arguments(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=g)[:, ::2], torch.randn(5, 3, generator=g)[1:]


def test_the_same_is_done_for_other_tensors():
    run, other = prepared(_operators, *_arguments(0)), _arguments(1)
    for made, expected in zip(run(*other), _operators(*other), strict=True):
        assert (made is None) == (expected is None)
        if made is not None:
            assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert torch.equal(made, expected)
    assert run(*other)[7].data_ptr() == other[1][1:].data_ptr()


class Pair(tuple):
    """As named tuples are."""


def test_a_launch_gets_the_addresses_of_the_new_tensors():
    log = Log()

    def function(x):
        out = stated.empty(8, torch.float32, CPU)
        log.launch(x[1:], (x[2:], None, 7, (out[4:],)), 0.5, None, out[:0], (1, 2))
        return [out]

    run, x = prepared(function, torch.zeros(6)), torch.zeros(6)
    (out,) = run(x)
    start, made = x.data_ptr(), out.data_ptr()
    assert log == [("stream", (start + 4, (start + 8, None, 7, (made + 16,)), 0.5, None, 0, (1, 2)))]


class Descriptor:
    """Of Triton's."""

    def __init__(self, base, shape, word=None):
        self.base, self.shape, self.block_shape, self.word = base, shape, [1, 2], word


def test_what_follows_from_addresses_is_found_again():
    log = Log()

    def span(a, b):
        return min(a, b), abs(a - b) // 8, ("rows", abs(a - b))

    def function(x, y):
        first, rows, known = span(x.data_ptr(), y.data_ptr())
        matrix = (x if x.data_ptr() == first else y).as_strided((1, 2), (2, 1)).expand(rows, 2)
        builder().derive(span, (x, y), matrix, known)
        by_driver = Descriptor(matrix, [rows, 2], 7), known, Descriptor(x, [3, 2])
        log.launch(matrix, *by_driver, Descriptor(x[1:], [2, 2], 8))
        return [x]

    memory = torch.zeros(100, 2)
    x, y = memory[:3].clone(), torch.zeros(3, 2)
    prepared(function, x, y)(y, other := torch.zeros(3, 2))
    a, b = y.data_ptr(), other.data_ptr()
    low, apart = min(a, b), abs(a - b)
    assert log.values == [(low, (low, apart // 8), ("rows", apart), (a, None), a + 8)]


def test_what_is_as_before_is_not_written_again():
    log = Log()
    x, y, written = torch.zeros(6), torch.zeros(6), []

    class Words(dict):
        def __setitem__(self, place, value):
            written.append(value)
            super().__setitem__(place, value)

    with Builder((x,)) as told:
        told.require(lambda: True, lambda: "stream")
        arguments = Arguments(log, (x,))
        arguments.words = Words()
        told.launch(arguments)
    run = told.finish([x]).run
    for z in (x, x, y, x):
        run((z,))
    assert log.values == [(z.data_ptr(),) for z in (x, x, y, x)]
    assert written == [n for z in (x, y, x) for n in ("stream", z.data_ptr())]


def test_memory_is_freed_after_its_last_use(monkeypatch):
    made, alive = [], []

    def empty_strided(*args, **kwargs):
        made.append(weakref.ref(x := real(*args, **kwargs)))
        alive.append(sum(ref() is not None for ref in made))
        return x

    real = torch.empty_strided

    def function(x):
        for _ in range(4):
            x = stated.call(torch.Tensor.copy_, stated.empty(3, torch.float32, CPU), x)
        stated.empty(5, torch.float32, CPU)  # which nothing needs
        return [x]

    run = prepared(function, torch.zeros(3))
    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    assert torch.equal(run(torch.ones(3))[0], torch.ones(3))
    assert (len(made), max(alive)) == (4, 2)


def test_small_memory_of_launches_is_one_allocation():
    log = Log()

    def function(x):
        for _ in range(3):
            a, b = (stated.empty(n, torch.float32, CPU) for n in (100, 200))
            log.launch(x, a)
            log.launch(a, b)
        log.launch(b, out := stated.empty(3, torch.float32, CPU))
        return [out]

    prepared(function, torch.zeros(3))(torch.ones(3))
    pairs = log.values[1:-1:2]
    assert pairs == pairs[:1] * 3  # where nobody needs what was there
    assert all(x % 64 == 0 for x in pairs[0])
    assert abs(pairs[0][0] - pairs[0][1]) <= 1024


OUTSIDE = torch.ones(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x + y],
        lambda x, y: [x + OUTSIDE],
        lambda x, y: [Log().launch(x + y)[0]],
        lambda x, y: [stated.call(torch.add, x, OUTSIDE)],
        lambda x, y: [stated.call(torch.Tensor.copy_, stated.empty(3, torch.float32, CPU), x + y)],
        lambda x, y: [x, stated.refuse("neither an argument's")][:1],
    ],
)
def test_what_is_not_stated_is_not_prepared(function):
    x, y = torch.zeros(3), torch.ones(3)
    with Builder((x, y)) as told:
        made = function(x, y)
    said = told.finish(made)
    assert isinstance(said, str)
    assert re.search("neither an argument's", said)


def test_arguments_that_share_memory():
    x = torch.zeros(6)
    with Builder((x[:3], x[3:])) as told:
        pass
    assert "share memory" in told.finish([])
    run = prepared(lambda a, b: [stated.call(torch.add, a, b)], x, x)  # the same twice is told by the kind
    assert torch.equal(run(*[torch.ones(6)] * 2)[0], torch.full((6,), 2.0))


def test_arguments_lie_to_each_other_as_in_the_prepared_call():
    log, kinds, memory = Log(), Kinds(), torch.arange(48.0).as_subclass(OnGpu)

    def run(a, b):
        """Whether it was prepared."""
        calls = []

        def function():
            calls.append(None)
            log.launch(a, b[1:])
            return [stated.call(torch.sub, a, b), stated.converted(b, lambda x: x)]

        difference, same = kinds.run(function, (a, b), None)
        assert torch.equal(difference, a - b)
        assert (same.data_ptr(), same.shape) == (b.data_ptr(), b.shape)
        if not calls:
            assert log[-1] == ("stream", (a.data_ptr(), b.data_ptr() + 4))
        return not calls

    parts = [memory[i : i + 8] for i in (0, 16, 32)]
    apart = [x.clone() for x in parts]
    assert [run(*parts[:2]) for _ in range(3)] == [False, False, True]
    assert run(*parts[1:])
    for other in ((parts[0], parts[2]), (parts[1], parts[0]), apart[:2]):
        assert [run(*other) for _ in range(3)] == [False, False, True]
    assert run(apart[2], apart[0])
    assert run(*parts[:2])


def test_kinds():
    x = torch.zeros(4, 4)
    kind = stated.kind_of
    assert kind((x, None)) == kind((x.view(4, 4), None))
    same = [x, x.T, x[:3], x.double(), torch.zeros(17)[1:].view(4, 4), None]
    assert len({kind((y,)) for y in same}) == len(same)
    assert kind((x, x)) != kind((x, x.clone()))


def test_no_builder_is_left_behind():
    with pytest.raises(KeyError), Builder((torch.zeros(1),)):
        raise KeyError
    assert builder() is None
    seen = []
    with Builder((torch.zeros(1),)) as told:
        thread = threading.Thread(target=lambda: seen.append(builder()))
        thread.start(), thread.join()
        with stated.unstated():
            seen.append(builder())
        assert builder() is told
    assert seen == [None, None]


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, for which alone calls are prepared."""

    is_cuda = True


def test_the_third_call_of_a_kind_is_prepared_and_none_inside_of_another():
    calls, x, kinds, holds = [], torch.zeros(2).as_subclass(OnGpu), Kinds(), [True]

    def run(number=0):
        def function():
            calls.append(number)
            if (told := builder()) is not None:
                told.require(lambda: holds[0], lambda: 0)
            return [x]

        before = len(calls)
        kinds.run(function, (x, None), number)
        return len(calls) == before

    assert [run(), run(), run()] == [False, False, True]
    holds[0] = False
    assert not run()
    holds[0] = True
    stated.forget()
    assert [run(), run(), run()] == [False, False, True]
    with Builder((x,)):
        assert not run()
    for number in range(1, stated.MOST_KINDS + 6):  # more kinds than are remembered
        run(number)
    assert not run()
    assert kinds.run(lambda: ["made"], (torch.zeros(2),), 0) == ["made"]  # on the CPU


# Where an operator says that it states all that it does; the CPU's own loops don't.
FILES = (
    "vocab/triton/*.py", "vocab/rows/launches.py", "vocab/rows/operator.py", "vocab/rows/walk.py", "groups/triton/*.py",
    "fp8/triton_launches.py", "fp8/torch_products.py", "fp8/torch_quantize.py", "ops/*/triton*.py",
    "ops/fp8_linear/torch_op.py", "ops/cross_entropy/torch_loss.py",
)  # fmt: skip
# In place, in functions that `call` is given, that refuse, or whose tensors have no memory.
IN_CALLS = {"_put_labels", "dequantized_product", "quantize", "_of_rows", "_behind"}


@pytest.mark.parametrize("pattern", FILES)
def test_operators_in_place_are_stated(pattern):
    """A result that isn't stated is found when a call is prepared; what is changed in place isn't."""
    root = Path(onchip.__file__).parent
    paths = [*root.glob(pattern)]
    assert paths
    for path in (x for x in paths if "shards" not in x.name):
        for function in (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)):
            if function.name in IN_CALLS or any("jit" in ast.unparse(x) for x in function.decorator_list):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    name = node.func.attr
                    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
                    assert not in_place, f"{path}:{node.lineno}: {ast.unparse(node)}"
