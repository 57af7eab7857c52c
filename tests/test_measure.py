"""Peak memory against allocations of known size, and the order and book-keeping of timings."""

import os
from types import SimpleNamespace

import pytest
import torch

from onchip.bench import measure

MIB = 1 << 20
# The kernel counts pages in batches, per core.
SLACK = MIB // 8 * ((os.cpu_count() or 1) + 2)


def tensor(mib):
    return torch.ones(mib * MIB // 4)  # written to, so resident


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


def large_blocks_freed_before():
    use_and_free(30, 20, 10, 5)


def small_blocks_freed_before():
    blocks = [torch.ones(30_000) for _ in range(1000)]  # 120 KB each, with blocks that stay between them
    kept.extend(blocks[::2])


kept = []


@pytest.fixture(autouse=True)
def _forget():
    yield
    kept.clear()


PEAKS = {
    nothing: 0,
    # Peak above what is returned: 100 MiB live at the peak, and 20 of them must be there for the result anyway.
    freed_then_returned: 80,
    held_while_freed: 100,
    one_after_the_other: 25,
    all_at_once: 37,
    returned_alone: 0,
    matrix_product: 20,
}
# What is left by large blocks matters to large ones, and what is left by small ones to all.
BEFORE = [
    *((lambda: None, step) for step in PEAKS),
    *((large_blocks_freed_before, step) for step in (one_after_the_other, held_while_freed)),
    *((small_blocks_freed_before, step) for step in (one_after_the_other, all_at_once)),
]


@pytest.mark.parametrize(("before", "step"), BEFORE)
def test_cpu_peak_is_that_of_the_allocations(before, step):
    step()
    before()
    assert abs(measure.peak_extra_bytes(step, device="cpu") - PEAKS[step] * MIB) < SLACK


def test_what_another_thread_allocates_meanwhile_is_left_out():
    others = iter([64, 0])

    def step():
        other = tensor(next(others))
        use_and_free(25)
        del other
        return []

    assert abs(measure.peak_extra_bytes(step, device="cpu") - 25 * MIB) < SLACK


def test_cpu_peak_is_sampled_where_the_kernel_keeps_none(monkeypatch):
    monkeypatch.setattr(measure.Path, "write_text", lambda *_: (_ for _ in ()).throw(PermissionError()))
    held_while_freed()
    # A sample may miss the peak by what is written within a millisecond or few.
    assert 30 * MIB < measure.peak_extra_bytes(held_while_freed, device="cpu") < 100 * MIB + SLACK


def test_allocator_is_left_as_it_was_found():
    measure.peak_extra_bytes(nothing, device="cpu")
    assert abs(measure.peak_extra_bytes(held_while_freed, device="cpu") - 100 * MIB) < SLACK


def test_steps_take_turns_and_warm_up_untimed():
    calls = []
    ticks = []
    steps = {name: lambda name=name: calls.append(name) or [] for name in "abc"}
    timings = measure.time_interleaved(steps, device="cpu", repeats=4, tick=lambda: ticks.append(None))
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
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append(cycles / measure._CYCLES))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure, "_as_large_as_l2", lambda device: SimpleNamespace(amax=lambda: said.append("L2")))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))

    def step():
        said.append("step")
        return []

    assert [measure.time_once(step, "cuda") for _ in range(2)] == [3.0, 3.0]
    assert said == [
        10.0, "L2", "event", "step", "event",
        pytest.approx(0.5 + 2 * 2), "L2", "event", "step", "event",
    ]  # fmt: skip
    said.clear()
    clock = iter([0.0, 0.0])
    measure.time_once(step, "cuda")  # the time before, it waited for half a second
    assert said[0] == 10.0


def test_a_step_that_raises_stops_the_timing_or_is_left_out():
    def failing():
        raise MemoryError("no room")

    steps, errors = {"a": nothing, "b": failing}, []
    with pytest.raises(MemoryError, match="no room"):
        measure.time_interleaved(steps, device="cpu", repeats=1)
    made = measure.time_interleaved(steps, device="cpu", repeats=3, on_error=lambda name, error: errors.append(name))
    assert (list(made), errors) == (["a"], ["b"])
