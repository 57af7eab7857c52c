"""Peak memory compared with allocations of known size, and the order and book-keeping of timings."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from onchip.bench import torch_steps

MIB = 1 << 20


def tensor(mib):
    return torch.ones(mib * MIB // 4)


def use_and_free(*sizes):
    for size in sizes:
        tensor(size)


def nothing():
    return []


def freed_then_returned():
    use_and_free(100)
    return [tensor(20)]


def held_while_freed():
    returned = tensor(20)
    use_and_free(100)
    return [returned]


def one_after_the_other():
    use_and_free(4, 25, 4, 25, 25)
    return []


def all_at_once():
    held = [tensor(n) for n in (4, 8, 25)]
    del held
    return []


def returned_alone():
    return [tensor(20)]


def matrix_product():
    x = torch.ones(2048, 512)  # 4 MiB
    return [(x @ x.T).sum()]  # of 16 MiB


# Peak above what is returned: of 100 MiB that live at the peak, 20 must be there for the result anyway.
PEAKS = {
    nothing: 0,
    freed_then_returned: 80,
    held_while_freed: 100,
    one_after_the_other: 25,
    all_at_once: 37,
    returned_alone: 0,
    matrix_product: 20,
}


@pytest.mark.parametrize("step", PEAKS)
def test_cpu_peak_is_that_of_the_allocations(step):
    assert abs(torch_steps.peak_extra_bytes(step, device="cpu") - PEAKS[step] * MIB) < 1024


def test_cpu_peak_has_the_gradients_of_backward(capfd):
    x = torch.ones(MIB, requires_grad=True)

    def step():
        return torch.autograd.grad((x * x).sum(), x)  # the square, and the gradients by both factors

    assert abs(torch_steps.peak_extra_bytes(step, device="cpu") - 4 * MIB) < 1024
    assert capfd.readouterr() == ("", "")


def test_steps_take_turns_and_warm_up_untimed():
    calls = []
    ticks = []
    steps = {name: lambda name=name: calls.append(name) or [] for name in "abc"}
    timings = torch_steps.time_interleaved(steps, device="cpu", repeats=4, tick=lambda: ticks.append(None))
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 15, 3)]
    assert all(sorted(names) == list("abc") for names in rounds)
    assert len(set(rounds)) > 1
    assert len(ticks) == 15
    assert list(timings) == ["a", "b", "c"]
    assert all(0 <= t.p10_ms <= t.median_ms <= t.p90_ms for t in timings.values())


def test_how_long_the_device_waits_for_the_host(monkeypatch):
    """A CUDA device that is none: ten milliseconds at first, then twice what the host took and a little."""
    said = []

    class Event:
        def __init__(self, enable_timing): ...
        def record(self):
            said.append("event")

        def synchronize(self): ...
        def elapsed_time(self, end):
            return 3.0

    clock = iter([0.0, 0.002, 1.0, 1.5])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append(cycles / torch_steps._CYCLES))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch_steps, "_as_large_as_l2", lambda device: SimpleNamespace(amax=lambda: said.append("L2")))
    monkeypatch.setattr(torch_steps.time, "perf_counter", lambda: next(clock))

    def step():
        said.append("step")
        return []

    assert torch_steps.host_ms(step) is None
    assert [torch_steps.time_once(step, "cuda") for _ in range(2)] == [3.0, 3.0]
    assert torch_steps.host_ms(step) == pytest.approx(500)  # the first run may have compiled
    assert said == [
        10.0, "L2", "event", "step", "event",
        pytest.approx(0.5 + 2 * 2), "L2", "event", "step", "event",
    ]  # fmt: skip
    said.clear()
    clock = iter([0.0, 0.0])
    torch_steps.time_once(step, "cuda")  # the time before, it waited for half a second
    assert said[0] == 10.0


def test_kernels_are_counted_but_copies_by_the_driver_are_not(monkeypatch):
    names = {"CUDA": ["softmax_tiles", "Memcpy DtoD (Device -> Device)", "softmax_tiles"], "CPU": ["aten::mm"]}
    events = [SimpleNamespace(name=x, device_type=SimpleNamespace(name=on)) for on in names for x in names[on]]
    profiled = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiled)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert torch_steps.kernels(nothing, "cuda") == 2
    assert torch_steps.kernels(nothing, "cpu") is None
    events.clear()  # no rights to the device's counters
    assert torch_steps.kernels(nothing, "cuda") is None


def test_a_step_that_raises_stops_the_timing_or_is_left_out():
    def failing():
        raise MemoryError("no room")

    steps, errors = {"a": nothing, "b": failing}, []
    with pytest.raises(MemoryError, match="no room"):
        torch_steps.time_interleaved(steps, device="cpu", repeats=1)
    made = torch_steps.time_interleaved(
        steps, device="cpu", repeats=3, on_error=lambda name, error: errors.append(name)
    )
    assert (list(made), errors) == (["a"], ["b"])
