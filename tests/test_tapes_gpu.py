"""Tapes of the ops on a GPU: from the third call of a kind on, the bits and the memory are those of the first."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from losses import mixed_plan, plan_in_forward
from onchip.core import configs
from onchip.frontend import torch_program, torch_tape
from onchip.torch import (
    cross_entropy,
    fp8_linear,
    grouped_matmul,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
)
from shared import aside, capture

pytestmark = pytest.mark.gpu
T, H, V = 300, 256, 1000


def _leaves(seed, *shapes, dtype=torch.bfloat16):
    """Anywhere in memory: what lies before them is of another size each time."""
    g = torch.Generator("cuda").manual_seed(seed)
    gap = torch.empty(seed << 20, device="cuda", dtype=torch.uint8)
    made = [torch.randn(shape, device="cuda", generator=g).to(dtype).requires_grad_() for shape in shapes]
    del gap
    return made


def _target(seed, *shape):
    g = torch.Generator("cuda").manual_seed(seed)
    y = torch.randint(V, shape or (T,), device="cuda", generator=g)
    y.view(-1)[seed::3] = -100
    return y


def _head(op, **options):
    def step(seed):
        hidden, weight, bias = _leaves(seed, (T, H), (V, H), (V,))
        return op(hidden, weight, _target(seed), bias, **options), (hidden, weight, bias)

    return step


def _normalized(seed):
    """By another number in each call."""
    hidden, weight = _leaves(seed, (T, H), (V, H))
    return linear_cross_entropy(hidden, weight, _target(seed), normalizer=100.0 + seed), (hidden, weight)


def _log_probs(seed):
    hidden, weight = _leaves(seed, (T, H), (V, H))
    made = linear_log_probs(hidden, weight, _target(seed), entropy=True)
    return made.log_prob.sum() + made.entropy.sum(), (hidden, weight)


def _rows(op, **options):
    def step(seed):
        (logits,) = _leaves(seed, (T, V))
        made = op(logits, _target(seed), **options)
        return made if isinstance(made, torch.Tensor) else made.log_prob.sum(), (logits,)

    return step


def _linear_jsd(seed):
    leaves = _leaves(seed, (T, H), (V, H), (T, H), (V, H))
    return linear_jsd(*leaves), leaves


def _jsd(seed):
    leaves = _leaves(seed, (T, V), (T, V))
    return jsd(*leaves), leaves[:1]


def _fp8(seed):
    x, weight = _leaves(seed, (T, H), (V, H))
    return fp8_linear(x, weight), (x, weight)


def _grouped(seed):
    x, weight = _leaves(seed, (T, H), (4, 128, H))
    sizes = torch.tensor([seed, 100, 0, 90], device="cuda")
    return grouped_matmul(x, weight, sizes), (x, weight)


def _rows_of_experts(seed):
    """Copied in forward too."""
    x, weight = _leaves(seed, (T, H), (4, 4096, H))
    sizes = torch.tensor([seed, 100, 0, 90], device="cuda")
    rows = torch.randint(T, (2 * T,), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    return grouped_matmul(x, weight, sizes, rows=rows, activation="swiglu"), (x, weight)


STEPS = {
    "linear_cross_entropy": _head(linear_cross_entropy),
    "linear_cross_entropy-none": _head(linear_cross_entropy, reduction="none", z_loss=1e-3, label_smoothing=0.1),
    "linear_cross_entropy-small": _head(linear_cross_entropy, scratch_bytes=1 << 20, strategy="recompute"),
    "linear_cross_entropy-fp8": _head(linear_cross_entropy, precision="fp8"),
    "linear_cross_entropy-normalized": _normalized,
    "linear_log_probs": _log_probs,
    "cross_entropy": _rows(cross_entropy, backend="triton"),
    "log_probs": _rows(log_probs, backend="triton"),
    "linear_jsd": _linear_jsd,
    "jsd": _jsd,
    "fp8_linear": _fp8,
    "grouped_matmul": _grouped,
    "grouped_matmul-rows": _rows_of_experts,
}


@pytest.fixture(params=["programs", "Triton's launchers"])
def tapes(monkeypatch, request):
    """How often a tape was made, run, or refused, and the most bytes that one's small memory takes; by both ways."""
    counts = {"made": 0, "run": 0, "refused": [], "small": 0, "programs": 0}
    counts["way"] = request.param
    if request.param == "programs":
        assert torch_program.extension() is not None
    else:
        monkeypatch.setattr(torch_program, "extension", lambda: None)

    def record(function, tensors):
        made, tape = real(function, tensors)
        if isinstance(tape, str):
            counts["refused"].append(tape)
            return made, tape
        counts["made"] += 1
        counts["small"] = max(counts["small"], tape.small)
        counts["programs"] += "program" in tape.source

        def run(*tensors):
            counts["run"] += 1
            return tape.run(*tensors)

        return made, tape._replace(run=run)

    real = torch_tape.record
    monkeypatch.setattr(torch_tape, "record", record)
    configs.clear_cache()
    return counts


def _bits(step, seed):
    out, leaves = step(seed)
    grads = torch.autograd.grad(out, leaves, torch.full_like(out, 0.5), allow_unused=True)
    return [out.detach(), *[x for x in grads if x is not None]]


def _check(step, tapes):
    seeds = (1, 2, 3, 4, 5)
    first = {}
    for seed in seeds:
        configs.clear_cache()  # no tapes
        first[seed] = _bits(step, seed)
    assert tapes["run"] == 0
    for seed in seeds:
        for a, b in zip(_bits(step, seed), first[seed], strict=True):
            assert torch.equal(a, b), seed
    assert not tapes["refused"]
    assert tapes["run"] >= 6
    assert tapes["programs"] == 0 if tapes["way"] != "programs" else tapes["programs"] >= 1
    return step


@pytest.mark.parametrize("name", STEPS)
def test_bits(name, tapes):
    _check(STEPS[name], tapes)


@pytest.mark.parametrize("name", ["mixed", "in_forward"])
def test_bits_of_other_plans(name, tapes):
    step = _head(linear_cross_entropy, scratch_bytes=1 << 24)
    for seed in (1, 2, 3, 4):
        with mixed_plan() if name == "mixed" else plan_in_forward(first=256):
            expected = [_bits(step, s) for s in (seed, seed + 1, seed + 2)]
            again = [_bits(step, s) for s in (seed, seed + 1, seed + 2)]
        for x, y in zip(expected, again, strict=True):
            assert all(map(torch.equal, x, y))
    assert tapes["run"] > 0
    assert not tapes["refused"]


@pytest.mark.parametrize("name", STEPS)
def test_memory(name, tapes):
    """The peak of a call from a tape is no higher than that of the first, and what small memory shares."""
    # Bytes that were asked for: blocks of the allocator's cache may be up to a MiB larger.
    peaks = []
    for _ in range(4):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        _bits(STEPS[name], 1)
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    assert tapes["run"] > 0
    assert peaks[3] <= peaks[0] + tapes["small"]


def test_another_thread(tapes):
    """One that CUDA hasn't seen, and several at once."""
    step = STEPS["linear_cross_entropy"]
    expected = {seed: _bits(step, seed) for seed in (1, 2, 3, 4)}
    before = tapes["run"]
    with ThreadPoolExecutor(4) as pool:
        for seed, made in zip(expected, pool.map(partial(_bits, step), expected), strict=True):
            assert all(map(torch.equal, made, expected[seed]))
    assert tapes["run"] > before


def test_an_error_of_the_drivers_is_raised():
    """Of a fill of more memory than there is."""
    steps = [torch_program.Fill(torch_program.Place("x"), 1 << 50)]
    program, _ = torch_program.build(steps, 0, {})
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: cuMemsetD8Async"):
        program(torch.cuda.current_stream().cuda_stream, torch.empty(8, device="cuda").data_ptr())


def test_streams_graphs_and_a_kept_graph(tapes):
    hidden, weight = _leaves(1, (T, H), (V, H))
    target = _target(1)
    step = partial(linear_cross_entropy, hidden, weight, target)

    def grads():
        return torch.autograd.grad(step(), (hidden, weight))

    expected = grads()
    for _ in range(3):
        assert all(map(torch.equal, grads(), expected))
    assert all(map(torch.equal, aside(grads), expected))
    graph, captured = capture(grads)
    graph.replay()
    assert all(map(torch.equal, captured, expected))
    loss = step()
    for keep in (True, True, False):
        assert all(map(torch.equal, torch.autograd.grad(loss, (hidden, weight), retain_graph=keep), expected))


@pytest.mark.parametrize("name", ["mixed", "in_forward"])
def test_the_same_memory(name, tapes):
    """Whose numbers change: eagerly, on another stream, captured by the caller, and after a call with other memory."""
    given = {seed: (*_leaves(seed, (T, H), (V, H)), _target(seed)) for seed in range(1, 16)}
    hidden, weight, target = (x.detach().clone() for x in given[1])
    hidden.requires_grad_(), weight.requires_grad_()

    def put(seed):
        with torch.no_grad():
            for x, y in zip((hidden, weight, target), given[seed], strict=True):
                x.copy_(y)

    def bits(*leaves):
        loss = linear_cross_entropy(*(leaves or (hidden, weight, target)), scratch_bytes=1 << 24)
        return [loss.detach(), *torch.autograd.grad(loss, leaves[:2] or (hidden, weight))]

    with mixed_plan() if name == "mixed" else plan_in_forward():
        expected = {}
        for seed in given:
            configs.clear_cache()  # no tapes
            expected[seed] = bits(*given[seed])

        def check(made, seed):
            assert all(map(torch.equal, made, expected[seed])), seed

        for seed in given:
            put(seed)
            check(aside(bits) if seed == 9 else bits(), seed)
            if seed == 11:
                check(bits(*given[seed]), seed)
        graph, captured = capture(bits)
        put(2)
        graph.replay()
        check(captured, 2)
        check(bits(), 2)


def test_weight_grad_out(tapes):
    hidden, weight = _leaves(1, (T, H), (V, H))
    out = torch.zeros(V, H, device="cuda")
    for i in range(1, 5):
        linear_cross_entropy(hidden, weight, _target(1), weight_grad_out=out).backward()
        if i == 1:
            once = out.clone()
        assert torch.allclose(out, i * once, rtol=1e-5)
    assert weight.grad is None
    assert tapes["run"] > 0


def test_a_watched_launch_is_not_repeated(tapes):
    from triton import knobs

    step, seen = STEPS["linear_cross_entropy"], []
    for _ in range(3):
        _bits(step, 1)
    before = tapes["run"]
    assert before > 0

    def hook(metadata):
        seen.append(metadata)

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        _bits(step, 1)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen
    assert tapes["run"] == before
