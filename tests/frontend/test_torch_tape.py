"""Tapes on the CPU, of functions of PyTorch's operators and of made-up launches; test_tapes_gpu.py has the ops."""

import re
import weakref

import pytest
import torch

from onchip.core import configs
from onchip.frontend import torch_recorder, torch_tape
from onchip.frontend.torch_recorder import Tape
from onchip.frontend.torch_tape import record


class Log(list):
    """What was launched."""

    def launch(self, *arguments):
        self.append(arguments)


def _taped(function, *tensors):
    _, tape = record(lambda: function(*tensors), tensors)
    assert isinstance(tape, Tape), tape
    return tape.run


def _operators(x, w):
    """Views, other dtypes, operators in place, with several results, and with a result that is an argument's memory."""
    z = torch.zeros(4, 3)
    z.view(-1)[:6].view(2, 3).add_(w[:2] * 2)
    copy = torch.empty(5, 2)
    copy.copy_(x.reshape(-1)[:10].view(5, 2))
    values, indices = (x * 3).sort(1)
    row = torch.zeros(16, dtype=torch.uint8)
    row.view(torch.float32).add_(x[0, 0])
    return [
        row.view(torch.int32),
        w.T,
        z,
        None,
        copy.view(torch.int32)[1:],
        values.T,
        indices,
        w[1:],
        (x > 0).to(torch.int64).sum() / torch.ones(()),
    ]


def _arguments(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=g)[:, ::2], torch.randn(5, 3, generator=g)[1:]


def test_a_tape_does_what_the_function_does():
    tape, other = _taped(_operators, *_arguments(0)), _arguments(1)
    for made, expected in zip(tape(*other), _operators(*other), strict=True):
        assert (made is None) == (expected is None)
        if made is not None:
            assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert torch.equal(made, expected)
    assert tape(*other)[7].data_ptr() == other[1][1:].data_ptr()


def test_a_launch_gets_the_addresses_of_the_new_tensors():
    log = Log()

    def function(x):
        out = torch.empty(8)
        tape = torch_tape.recorder()
        if tape is not None:
            stream = tape.once(lambda: "stream")
            described = tape.once(lambda *a: ("map", *a), x[2:], 16)
            assert tape.once(lambda: "stream").code != described.code
            tape.call(log.launch, stream, (x[1:], None, out[4:]), described, 7, 0.5)
        return [out]

    tape, x = _taped(function, torch.zeros(6)), torch.zeros(6)
    (out,) = tape(x)
    start = x.data_ptr()
    assert log == [("stream", (start + 4, None, out.data_ptr() + 16), ("map", start + 8, 16), 7, 0.5)]


def test_what_follows_from_addresses_is_found_again():
    log = Log()

    def span(a, b):
        return min(a, b), abs(a - b), ("rows", abs(a - b))

    def function(x, y):
        first, rows, known = span(x.data_ptr(), y.data_ptr())
        matrix = (x if x.data_ptr() == first else y).as_strided((1, 2), (2, 1)).expand(rows, 2)
        tape = torch_tape.recorder()
        if tape is not None:
            tape.derive(span, (x, y), matrix, known)
            tape.call(log.launch, matrix, tape.rows(matrix), known)
        return [x.sum()]

    x, y = torch.zeros(3), torch.zeros(3)
    _taped(function, x, y)(y, x.clone())
    other = log.pop()
    assert other[0] != min(x.data_ptr(), y.data_ptr()) or other[1] != abs(x.data_ptr() - y.data_ptr())
    assert other[2] == ("rows", other[1])


def test_memory_is_freed_after_its_last_use(monkeypatch):
    made, alive = [], []
    real = torch_recorder.allocator

    def allocator(device):
        def new(shape, strides, dtype):
            made.append(weakref.ref(x := real(device)(shape, strides, dtype)))
            alive.append(sum(ref() is not None for ref in made))
            return x

        return new

    monkeypatch.setattr(torch_recorder, "allocator", allocator)

    def function(x):
        for _ in range(4):
            x = torch.empty(3).copy_(x)
        return [x]

    assert torch.equal(_taped(function, torch.zeros(3))(torch.ones(3))[0], torch.ones(3))
    assert max(alive) == 2


OUTSIDE = torch.ones(3)
twice = torch.library.custom_op(
    "onchip_test_tape::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, y: [x * float(y.sum())], "may depend on values"),
        (lambda x, y: [x.nonzero()], "may depend on values"),
        (lambda x, y: [x[y > 0]], "may depend on values"),
        (lambda x, y: [x + OUTSIDE], "neither an argument's"),
        (lambda x, y: [x + torch.tensor([1.0, 2.0, 3.0])], "neither an argument's|may depend"),
        (lambda x, y: [twice(x)], "may depend on values"),
    ],
)
def test_what_is_not_repeated(function, reason):
    x, y = torch.zeros(3), torch.ones(3)
    made, tape = record(lambda: function(x, y), (x, y))
    assert isinstance(tape, str)
    assert torch.equal(made[0], function(x, y)[0])
    assert re.search(reason, tape)


def test_operators_are_called_by_what_reads_arguments_faster():
    aten, called = torch.ops.aten, torch_recorder._called
    assert called(aten._scaled_mm_v2.default) is torch._scaled_mm_v2
    assert called(aten.index_select.default) is torch.index_select
    for func in (aten.add.Tensor, aten.sum.dim_IntList, aten.new_ones.default, twice._opoverload):
        assert called(func) is func._op


def test_arguments_that_share_memory():
    x = torch.zeros(6)
    assert "share memory" in record(lambda: [x[:3] + x[3:]], (x[:3], x[3:]))[1]
    tape = _taped(lambda a, b: [a + b], x, x)  # the same twice is told by the kind
    assert torch.equal(tape(*[torch.ones(6)] * 2)[0], torch.full((6,), 2.0))


def test_kinds():
    x = torch.zeros(4, 4)
    kind = torch_tape.kind_of
    assert kind((x, None)) == kind((x.view(4, 4), None))
    same = [x, x.T, x[:3], x.double(), torch.zeros(17)[1:].view(4, 4), None]
    assert len({kind((y,)) for y in same}) == len(same)
    assert kind((x, x)) != kind((x, x.clone()))


def test_no_recorder_is_left_behind():
    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        record(fail, (torch.zeros(1),))
    assert torch_tape.recorder() is None


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, for which alone there are tapes."""

    is_cuda = True


def test_the_third_call_of_a_kind_is_repeated_and_none_while_another_is_recorded(monkeypatch):
    calls, x = [], torch.zeros(2).as_subclass(OnGpu)
    tapes = torch_tape.Tapes()
    monkeypatch.setattr(
        torch_tape, "record", lambda function, tensors: (function(), Tape(lambda *_: ["tape"], [ready]))
    )
    holds = [True]

    def ready():
        return holds[0]

    def run(number=0):
        return tapes.run(lambda: calls.append(number) or ["made"], (x, None), number)

    first, second, third = run(), run(), run()
    assert (first, second, third) == (None, ["made"], ["tape"])
    assert calls == [0]
    holds[0] = False
    assert run() is None
    holds[0] = True
    configs.clear_cache()
    assert run() is None
    run()
    assert run() == ["tape"]
    with torch_tape._recording(object()):
        assert run() is None
    for number in range(1, 70):  # more kinds than are remembered
        run(number)
    assert run() is None
    assert tapes.run(lambda: ["made"], (torch.zeros(2),), 0) is None  # on the CPU
