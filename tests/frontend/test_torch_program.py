"""Programs of launches, on a GPU that isn't there, in a process of their own (fake_cuda.py); test_tapes_gpu.py has real
ones.  And places in one allocation, and tapes whose launches are simulated on the CPU.
"""

import ctypes
import re
import struct
import sys
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_cuda
from onchip.frontend import torch_program, torch_script, torch_tape
from onchip.frontend.torch_program import Copy, Fill, Kernel, Launch, Map, Place
from onchip.frontend.torch_recorder import Recorder
from onchip.frontend.torch_script import ALIGNED, places

# ----------------------------------------------------------------------------------- against Triton's own launcher


@fake_cuda.possible
@pytest.mark.parametrize("check", ["launches", "products", "programs"])
def test_on_a_gpu_that_is_not_there(check):
    assert fake_cuda.run(__file__, check).splitlines()[-1] == "as Triton does"


def _steps():
    """Calls of ops, by name."""
    from onchip.torch import cross_entropy, fp8_linear, grouped_matmul, linear_cross_entropy, linear_log_probs

    def leaf(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()

    def head(op=linear_cross_entropy, t=300, h=256, v=1000, **options):
        return lambda: op(leaf(t, h), leaf(v, h), torch.arange(t) % v, leaf(v), backend="triton", **options)

    return {
        "linear_cross_entropy": head(),
        "every loss": head(reduction="none", z_loss=1e-3, label_smoothing=0.1, softcap=30.0),
        "recomputed": head(scratch_bytes=1 << 20, strategy="recompute"),
        "unaligned": head(h=260, v=1001),
        "mixed": head(),
        "in forward": head(v=999),
        "cross_entropy": lambda: cross_entropy(leaf(300, 1000), torch.arange(300), backend="triton"),
        "linear_log_probs": lambda: (
            linear_log_probs(leaf(300, 256), leaf(1000, 256), torch.arange(300), entropy=True, backend="triton").entropy
        ),
        "fp8_linear": lambda: fp8_linear(leaf(256, 512), leaf(1024, 512), backend="triton"),
        "fp8_linear, padded scales": lambda: fp8_linear(leaf(256, 256), leaf(384, 256), leaf(384), backend="triton"),
        "grouped_matmul": lambda: grouped_matmul(
            leaf(300, 256), leaf(4, 128, 256), torch.tensor([9, 100, 0, 90]), backend="triton"
        ),
    }


def launches(gpu):
    """What a program makes of each launch that was recorded, with the same addresses, is what Triton's launcher did."""
    seen = []

    def finish(self, results):
        made = real(self, results)
        if not isinstance(made, str):
            by_triton = [x for x in gpu.library.take() if x.kind == "launch"]
            seen.append((len(by_triton), made))
            _compare(self, by_triton, gpu)
        else:
            print(made, file=sys.stderr)
        return made

    real, Recorder.finish = Recorder.finish, finish
    import onchip.groups.triton.op
    from losses import mixed_plan, plan_in_forward

    onchip.groups.triton.op.check = lambda call: None  # which reads numbers on the CPU
    for name, step in _steps().items():
        before = len(seen)
        with {"mixed": mixed_plan, "in forward": plan_in_forward}.get(name, nullcontext)():
            for _ in range(3):
                gpu.library.take()
                out = step()
                gpu.library.take()
                out.backward(torch.ones_like(out))
        print(name, [count for count, _ in seen[before:]])
        assert len(seen) >= before + 2, name  # forward and backward
        for _, tape in seen[before:]:
            assert "program" in tape.source, name
        if name.startswith("fp8_linear"):
            assert re.findall(r"\bprogram\d+\(", seen[before][1].source) == [ANY], name  # what pads scales is a fill


def products(gpu):
    """A product of cuBLAS's gets what the tape allocated, and the caller's bias: no view is made and nothing copied."""
    from onchip.fp8 import torch_products
    from onchip.torch import fp8_linear

    given, sources = [], []

    def multiply(a, b, scale_a, _, __, scale_b, ___, ____, bias, dtype):
        assert a.is_contiguous()
        assert all(t.T.is_contiguous() for t in (b, *scale_a, *scale_b))
        given.append(None if bias is None else bias.data_ptr())
        return torch.zeros(len(a), b.shape[1], dtype=dtype)

    def finish(self, results):
        made = real(self, results)
        sources.append(made.source)
        return made

    real, Recorder.finish = Recorder.finish, finish
    torch_products.scaled_mm_refusal = lambda *_: None
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm_v2", multiply, "CPU")
    for _ in range(4):
        shapes = (64, 512), (640, 512), (640,)
        x, weight, bias = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        out = fp8_linear(x, weight, bias, backend="scaled_mm")
        assert given.pop() == bias.data_ptr()
        out.backward(torch.ones_like(out))
    forward, _ = sources
    assert not re.search(r"as_strided|view", forward)
    assert len(re.findall(r"\bprogram\d+\(", forward)) == 1  # zeros beside the weight's scales, and two launches


def _compare(recorder, by_triton, gpu):
    lines = [x for x in recorder._lines if x.step is not None and isinstance(x.step, Launch)]
    assert len(lines) == len(by_triton)
    names = {f"p_{m.name}": m.address for m in recorder._all} | recorder._constants
    for line in recorder._lines:
        if line.does is torch_script.Does.COMPUTE:
            exec(line.code, names)
    for line, expected in zip(lines, by_triton, strict=True):
        program, slots = torch_program.build([line.step], 0, {})
        program(gpu.stream, *[eval(code, names) for code in slots])
        (made,) = gpu.library.take()
        assert made == expected


def programs(gpu):
    """Places, attributes, tensor maps, errors, threads without a context."""
    library, native = gpu.library, torch_program.extension()
    library.kernel(0x99, (8, 4, 2, 1, 4, 8, 128, 8, 8))
    base = Place("p_x", 16)
    tensor_map = Map(None, base, 3, 2, 9, [128, 64], [Place("rows"), 4096], [8192, 1], 1)
    params = [("*bf16", base), ("i32", Place("rows")), ("bf16", torch_program.number("bf16", 1.5))]
    params += [("i1", torch_program.number("i1", True)), ("fp32", torch_program.number("fp32", 0.1))]
    params += [("i64", torch_program.number("i64", -3)), ("nvTmaDesc", tensor_map)]
    kernel = Kernel(0x99, (5, 6, 7), 8, 2, 4096, True, True)
    launch = torch_program.launch(kernel, params)
    with pytest.raises(LookupError):
        torch_program.launch(kernel, params[:-1])
    with pytest.raises(LookupError):
        torch_program.launch(kernel, [("i64", 0), ("i64", 0), *params[2:]])
    with pytest.raises(LookupError):
        torch_program.number("fp8e4nv", 1.0)
    steps = [Fill(Place("p_y", 8), 24), launch, Copy(Place("p_y"), Place("p_x", 4), 12), launch]
    run, slots = torch_program.build(steps, 3, {"p_y": ("p_x", 1024)})
    assert slots == ["p_x", "rows"]
    library.c.fake_no_context()
    for start, rows in ((0x10000, 7), (0x20000, 123)):
        run(0x77, start, rows)
        fill, first, copy, second = library.take()
        assert first == second
        assert (fill.kind, fill.function, fill.stream, fill.grid) == ("zero", start + 1032, 0x77, (24, 0, 0))
        assert (copy.kind, copy.function, copy.grid[:2]) == ("copy", start + 1024, (12, start + 4))
        assert (first.stream, first.grid, first.block, first.shared) == (0x77, (10, 6, 7), (256, 1, 1), 4096)
        *numbers, encoded, scratch, profile = first.params
        expected = ("<Q", start + 16), ("<i", rows), ("<H", 0x3FC0), ("<b", 1), ("<f", 0.1), ("<q", -3)
        assert numbers == [struct.pack(*x) for x in expected]
        assert scratch == profile == bytes(8)
        assert struct.unpack_from("<3Q", encoded)[::2] == (start + 16, 4096)
        ids = [struct.unpack_from("<I", first.attributes, at)[0] for at in range(0, len(first.attributes), 72)]
        assert ids == [6, 2, 4, 5]  # programmatic serialisation, cooperative, cluster dimension, cluster scheduling
    assert library.c.fake_retained() == 1
    for wrong in ((), (1,), (1, 2, 3, 4), ("a", 1, 2)):
        with pytest.raises(TypeError):
            run(*wrong)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: a number"):
        run(0, 0x10000, 1 << 31)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: cuTensorMapEncodeTiled"):
        run(0, 0x10001, 1)
    library.take()
    library.c.fake_fail(3)  # the map's is the first
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE: cuMemcpyDtoDAsync \(2\)"):
        run(0, 0x10000, 1)
    assert len(library.take()) == 3
    for wrong in [(0, 1, (), ((3,),)), (0, 1, (), ((1, (1, 0), 4),)), (0, 1, ((1,),), ()), (0, 1, (), ((0, 1),))]:
        with pytest.raises((TypeError, ValueError)):
            native.program(*wrong)
    with pytest.raises(OSError, match=r"no_such|cannot open"):
        native.load("libno_such.so")


# --------------------------------------------------------------------------------------------------------- places

_LIVES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 20)), max_size=12)


@given(_LIVES)
@settings(max_examples=200, deadline=None)
def test_what_is_needed_at_once_does_not_overlap(things):
    sizes, lives = [size for size, *_ in things], [(first, first + more) for _, first, more in things]
    at, total = places(sizes, lives)
    assert all(start % ALIGNED == 0 for start in at)
    assert total == max((start + size for start, size in zip(at, sizes, strict=True)), default=0)
    for i, (first, last) in enumerate(lives):
        for j in range(i):
            if lives[j][0] <= last and first <= lives[j][1]:
                (_, end), (start, _) = sorted([(at[i], at[i] + sizes[i]), (at[j], at[j] + sizes[j])])
                assert end <= start
    assert total <= sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


# ------------------------------------------------------------------------------------------- launches on the CPU


class Simulated:
    """An extension whose only kernel adds a number to eight others, in memory of the CPU's."""

    def __init__(self):
        self.log = []

    def takes(self, function, sizes):
        return True

    def program(self, device, slots, maps, steps):
        def run(stream, *given):
            assert len(given) == slots
            self.log.append([kind for kind, *_ in steps])
            for kind, *step in steps:
                at = [(given[slot] if slot >= 0 else 0) + more for slot, more in step[:-1]] if kind else None
                if kind == 0:
                    into, of, number = ((given[slot] if slot >= 0 else 0) + more for _, slot, more in step[-1][:3])
                    add(into, of, number)
                elif kind == 1:
                    ctypes.memset(at[0], 0, step[-1])
                else:
                    ctypes.memmove(at[0], at[1], step[-1])

        return run


def add(into, of, number):
    values = (ctypes.c_float * 8).from_address(of)
    (ctypes.c_float * 8).from_address(into)[:] = [x + number for x in values]


@pytest.fixture
def simulated(monkeypatch):
    made = Simulated()
    monkeypatch.setattr(torch_program, "extension", lambda: made)
    return made


def _launch(into, of, number):
    add(into.data_ptr(), of.data_ptr(), number)
    tape = torch_tape.recorder()
    if tape is not None:
        stream = tape.once(_stream)
        before = (1, 1, 1, stream)
        values = (into, of, number)
        tape.launch(_python, before, values, Kernel(0, (1, 1, 1), 4, 1, 0, False, False), ["*fp32", "*fp32", "i32"])


def _stream():
    return 7


def _python(x, y, z, stream, *values):
    add(*values)


_KINDS = "new", "zeros", "large", "launch", "zero", "copy", "clone", "operator"
_WORDS = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 99), st.integers(0, 99)), max_size=25)


def _follow(words, x):
    """What these words say, on the first eight numbers of each tensor."""
    there = [x]
    for i, (word, a, b) in enumerate(words):
        one, other = there[a % len(there)], there[b % len(there)]
        if word in ("new", "large"):
            there.append(torch.empty(8 if word == "new" else 1 << 18))
            _launch(there[-1], one, i)
        elif word == "zeros":
            there.append(torch.zeros(8))
        elif word == "launch" and other is not x:
            _launch(other, one, i)
        elif word == "zero" and one is not x:
            one[:8].zero_()
        elif word == "copy" and other is not x and one is not other:
            other[:8].copy_(one[:8])
        elif word == "clone":
            there.append(one[:8].clone())
        elif word == "operator":
            there.append(one[:8] + other[:8])
    return [there[-1][:8], there[len(there) // 2][:8] + 0]


@pytest.mark.parametrize("native", [True, False])
@given(words=_WORDS)
@settings(max_examples=150, deadline=None)
def test_a_tape_with_launches_does_what_the_function_does(native, words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_program, "extension", Simulated if native else lambda: None)
        x = torch.arange(8.0)
        _, tape = torch_tape.record(lambda: _follow(words, x), (x,))
        assert not isinstance(tape, str), tape
        other = torch.arange(8.0) * 3
        made, expected = tape.run(other.clone()), _follow(words, other.clone())
        for a, b in zip(made, expected, strict=True):
            assert torch.equal(a, b)


def test_launches_in_a_row_are_one_call(simulated):
    def function(x):
        a, b = torch.zeros(8), torch.empty(8)
        _launch(a, x, 1)
        _launch(b, a, 2)
        out = b.clone()
        _launch(out, out, 3)
        return [out]

    x = torch.arange(8.0)
    _, tape = torch_tape.record(lambda: function(x), (x,))
    assert torch.equal(tape.run(x)[0], x + 6)
    assert simulated.log == [[1, 0, 0, 2, 0]]
    assert tape.small == 2 * ALIGNED - (ALIGNED - 32)


@pytest.mark.parametrize("kind", ["fp8e4nv", "i1"])
def test_a_launch_that_is_not_known_is_left_to_triton(simulated, kind):
    def function(x):
        out, tape = torch.empty(8), torch_tape.recorder()
        if tape is not None:
            kernel = Kernel(0, (1, 1, 1), 4, 1, 0, False, False)
            tape.launch(_python, (1, 1, 1, tape.once(_stream)), (out, x, 2), kernel, ["*fp32", kind, "i32"])
        return [out]

    x = torch.arange(8.0)
    _, tape = torch_tape.record(lambda: function(x), (x,))
    assert torch.equal(tape.run(x)[0], x + 2)
    assert simulated.log == []


def test_what_a_kernel_is_compiled_for_does_not_follow_from_addresses(simulated):
    def function(x):
        out, tape = torch.empty(8), torch_tape.recorder()
        rows = SimpleNamespace()
        tape.derive(lambda address: (address, 1, 1), (x,), x[:1], rows)
        kernel = Kernel(0, (1, 1, 1), 4, 1, 0, False, False)
        tape.launch(_python, (1, 1, 1, tape.once(_stream)), (out, x, rows), kernel, ["*fp32", "*fp32", "constexpr"])
        return [out]

    x = torch.arange(8.0)
    assert "follows from addresses" in torch_tape.record(lambda: function(x), (x,))[1]


@pytest.mark.parametrize(
    ("taken", "views"),
    [
        (lambda made: [made.T * 2, made.T * 3], 0),
        (lambda made: [made * 2, made.T * 3], 1),
        (lambda made: [made.T * 2, made], 1),
        (lambda made: [made.view(2, 2, 2)], 0),
        (lambda made: [made[:1] * 2, made.T * 2], 2),
        (lambda made: [made.view(torch.int32).T * 2], 0),
    ],
)
def test_memory_is_made_as_it_is_first_taken(simulated, taken, views):
    def function(x):
        made = torch.empty(2, 4)
        _launch(made, x, 1)
        return taken(made)

    x, other = torch.arange(8.0), torch.arange(8.0) * 3
    _, tape = torch_tape.record(lambda: function(x), (x,))
    assert len(re.findall(r"\.as_strided\(|\.view\(|_view\(", tape.source)) == views
    expected = torch.empty(2, 4)
    add(expected.data_ptr(), other.data_ptr(), 1)
    for a, b in zip(tape.run(other), taken(expected), strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())


def test_memory_is_freed_between_programs(simulated):
    """A tape has no more at once than the function: what is large is not allocated before what was freed there."""
    size = 1 << 18

    def function(x):
        for _ in range(4):
            made = torch.empty(size)
            _launch(made, x, 1)
            x = made
        return [x[:8].clone()]

    x = torch.arange(8.0)
    _, tape = torch_tape.record(lambda: function(x), (x,))
    lines, alive, most = [line.strip() for line in tape.source.splitlines()], 0, 0
    for line in lines:
        alive += f"({size}," in line
        alive -= line.startswith("del ") and len(line.split(","))
        most = max(most, alive)
    assert most == 2
    assert all(a != b for a, b in pairwise(lines))
    assert torch.equal(tape.run(x)[0], x + 4)


if __name__ == "__main__":
    with fake_cuda.gpu() as made_up:
        {"launches": launches, "products": products, "programs": programs}[sys.argv[1]](made_up)
    print("as Triton does")
