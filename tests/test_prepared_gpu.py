"""Prepared calls on a GPU: from the third call of a kind on, bits and memory are those of the first."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from losses import mixed_plan, plan_in_forward
from onchip.frontend import torch_builder, torch_prepared
from onchip.masks import Causal, Documents
from onchip.torch import (
    TopK,
    attention,
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
SMALL = 2 << 20  # bytes


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


def _soft(op, labels, **options):
    """Of so many labels for each token, or of every entry."""

    def step(seed):
        hidden, weight, probs = _leaves(seed, (T, H), (V, H), (T, labels))
        probs = probs.detach().float().softmax(-1)
        ids = torch.arange(labels, device="cuda").expand(T, labels)
        target = probs if labels == V else TopK(ids, probs, "probs", "truncated")
        return op(hidden, weight, target, backend="triton", **options), (hidden, weight)

    return step


def _with_stats(seed):
    hidden, weight = _leaves(seed, (T, H), (V, H))
    return linear_cross_entropy(hidden, weight, _target(seed), return_stats=True)[0], (hidden, weight)


def _weighed(seed):
    hidden, weight, of_class = _leaves(seed, (T, H), (V, H), (V,))
    of_class = of_class.detach().float().abs()
    made = linear_cross_entropy(hidden, weight, _target(seed), class_weight=of_class, label_smoothing=0.1)
    return made, (hidden, weight)


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


def _attention(mask, **options):
    def step(seed):
        shapes = [(2, T, 4, 64), (2, T, 2, 64), (2, T, 2, 64)]
        q, k, v = _leaves(seed, *([(b, h, t, d) for b, t, h, d in shapes] if options else shapes))
        (sinks,) = _leaves(seed, (4,), dtype=torch.float32)
        return attention(q, k, v, mask(seed), sinks=sinks, backend="triton", **options), (q, k, v, sinks)

    return step


def _documents(seed):
    return Documents(torch.arange(T, device="cuda") // (50 + seed)) & Causal()


def _lowered(seed):
    return _documents(seed).lower(2, T, T, torch.empty(0, device="cuda"))


STEPS = {
    "linear_cross_entropy": _head(linear_cross_entropy),
    "linear_cross_entropy-none": _head(linear_cross_entropy, reduction="none", z_loss=1e-3, label_smoothing=0.1),
    "linear_cross_entropy-small": _head(linear_cross_entropy, scratch_bytes=1 << 20, strategy="recompute"),
    "linear_cross_entropy-normalized": _normalized,
    "linear_cross_entropy-shift": _head(linear_cross_entropy, shift=True),
    "linear_cross_entropy-stats": _with_stats,
    "linear_cross_entropy-class_weight": _weighed,
    "linear_cross_entropy-topk": _soft(linear_cross_entropy, 3, z_loss=1e-3),
    "linear_cross_entropy-dense": _soft(linear_cross_entropy, V, return_stats=False),
    "linear_log_probs": _log_probs,
    "cross_entropy": _rows(cross_entropy, backend="triton"),
    "log_probs": _rows(log_probs, backend="triton"),
    "linear_jsd": _linear_jsd,
    "jsd": _jsd,
    "fp8_linear": _fp8,
    "grouped_matmul": _grouped,
    "grouped_matmul-rows": _rows_of_experts,
    "attention": _attention(lambda seed: Causal()),
    "attention-documents": _attention(_documents),
    "attention-lowered": _attention(_lowered),
    "attention-bhtd": _attention(_documents, layout="bhtd"),
}


@pytest.fixture
def prepared(monkeypatch):
    """How often a call was prepared, run so, or refused."""
    counts = {"made": 0, "run": 0, "refused": []}

    def finish(self, results):
        made = real_finish(self, results)
        counts["made"] += not isinstance(made, str)
        counts["refused"] += [made] if isinstance(made, str) else []
        return made

    def tensors(self, given):
        counts["run"] += 1
        return real_tensors(self, given)

    real_finish, real_tensors = torch_builder.Builder.finish, torch_builder.Prepared.tensors
    monkeypatch.setattr(torch_builder.Builder, "finish", finish)
    monkeypatch.setattr(torch_builder.Prepared, "tensors", tensors)
    torch_prepared.forget()
    return counts


def _bits(step, seed):
    out, leaves = step(seed)
    grads = torch.autograd.grad(out, leaves, torch.full_like(out, 0.5), allow_unused=True)
    return [out.detach(), *[x for x in grads if x is not None]]


def _check(step, prepared):
    seeds = (1, 2, 3, 4, 5)
    first = {}
    for seed in seeds:
        torch_prepared.forget()
        first[seed] = _bits(step, seed)
    assert prepared["run"] == 0
    for seed in seeds:
        for a, b in zip(_bits(step, seed), first[seed], strict=True):
            assert torch.equal(a, b), seed
    assert not prepared["refused"]
    assert prepared["run"] >= 6
    return step


@pytest.mark.parametrize("name", STEPS)
def test_bits(name, prepared):
    _check(STEPS[name], prepared)


@pytest.mark.parametrize("name", ["mixed", "in_forward"])
def test_bits_of_other_plans(name, prepared):
    step = _head(linear_cross_entropy, scratch_bytes=1 << 24)
    for seed in (1, 2, 3, 4):
        with mixed_plan() if name == "mixed" else plan_in_forward(first=256):
            expected = [_bits(step, s) for s in (seed, seed + 1, seed + 2)]
            again = [_bits(step, s) for s in (seed, seed + 1, seed + 2)]
        for x, y in zip(expected, again, strict=True):
            assert all(map(torch.equal, x, y))
    assert prepared["run"] > 0
    assert not prepared["refused"]


@pytest.mark.parametrize("name", STEPS)
def test_memory(name, prepared):
    """The peak of a prepared call is no higher than that of the first, and what small memory shares."""
    # Bytes that were asked for: blocks of the allocator's cache may be up to a MiB larger.
    peaks = []
    for _ in range(4):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        _bits(STEPS[name], 1)
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    assert prepared["run"] > 0
    assert peaks[3] <= peaks[0] + SMALL


def test_arguments_in_one_memory(prepared):
    """q, k and v of one projection: they lie to each other in the same way in each call, then in another way."""

    def step(seed, order):
        (x,) = _leaves(seed, (2, T, 3, 4, 64))
        q, k, v = (x.select(2, i) for i in order)
        return attention(q, k, v, backend="triton"), (x,)

    seeds = (1, 2, 3, 4, 5, 1, 2)
    for order in ((0, 1, 2), (0, 2, 1)):
        first = {}
        for seed in seeds:
            torch_prepared.forget()
            first[seed] = _bits(partial(step, order=order), seed)
        before = prepared["run"]
        for _ in range(2):
            for seed in seeds:
                assert all(map(torch.equal, _bits(partial(step, order=order), seed), first[seed]))
        assert prepared["run"] >= before + 20


def test_another_thread(prepared):
    """One that CUDA hasn't seen, and several at once."""
    step = STEPS["linear_cross_entropy"]
    expected = {seed: _bits(step, seed) for seed in (1, 2, 3, 4)}
    before = prepared["run"]
    with ThreadPoolExecutor(4) as pool:
        for seed, made in zip(expected, pool.map(partial(_bits, step), expected), strict=True):
            assert all(map(torch.equal, made, expected[seed]))
    assert prepared["run"] > before


@pytest.mark.parametrize("name", ["mixed", "in_forward"])
def test_the_same_memory(name, prepared):
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
            torch_prepared.forget()
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


def test_weight_grad_out(prepared):
    hidden, weight = _leaves(1, (T, H), (V, H))
    out = torch.zeros(V, H, device="cuda")
    for i in range(1, 5):
        linear_cross_entropy(hidden, weight, _target(1), weight_grad_out=out).backward()
        if i == 1:
            once = out.clone()
        assert torch.allclose(out, i * once, rtol=1e-5)
    assert weight.grad is None
    assert prepared["run"] > 0


def test_a_watched_launch_is_not_prepared(prepared):
    from triton import knobs

    step, seen = STEPS["linear_cross_entropy"], []
    for _ in range(3):
        _bits(step, 1)
    before = prepared["run"]
    assert before > 0

    def hook(metadata):
        seen.append(metadata)

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        _bits(step, 1)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen
    assert prepared["run"] == before
