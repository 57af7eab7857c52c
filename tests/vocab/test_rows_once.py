"""The kernel that reads each row of logits once: its rings, which calls it serves, and its numbers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from emulated import emulating
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.cross_entropy.checks import CHECK_CASES, make_inputs
from onchip.torch import cross_entropy
from onchip.vocab.rows.memory import row_rings

SHORT = 50304
BOUND = {torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float32: 2e-6}


def step(logits, target, *, backend="triton", **options):
    """The loss and its gradient."""
    leaf = logits.detach().requires_grad_()
    loss = cross_entropy(leaf, target, backend=backend, **options)
    return [loss.detach(), *torch.autograd.grad(loss, leaf)]


def assert_right(made, logits, target, **options):
    """Both, beside float64."""
    expected, exact = step(logits.double(), target, backend="plain", **options)
    assert abs(made[0] - expected) <= 1e-5 * max(1.0, abs(expected))
    assert (made[1] - exact).norm() <= BOUND[logits.dtype] * exact.norm()


def problem(tokens, vocab, dtype, device="cpu", *, outer=0):
    """Logits and targets; with `outer`, rows that lie apart."""
    torch.manual_seed(tokens + vocab)
    logits = (torch.randn(tokens, vocab + outer, device=device) * 3).to(dtype)[:, :vocab]
    target = torch.randint(vocab, (tokens,), device=device)
    for row, y in enumerate((vocab - 1, 0, -100, vocab // 2 - 1)[:tokens]):
        target[row] = y
    return logits, target


CASES = {
    "several rows in a ring": (problem, (9, SHORT, torch.bfloat16), {}),
    "a row fills the ring": (problem, (6, 128256, torch.bfloat16), {}),
    "more than a multiprocessor holds": (problem, (6, 262144, torch.bfloat16), {}),
    "float16, apart": (partial(problem, outer=24), (9, 56008, torch.float16), {"softcap": 20.0, "z_loss": 1e-3}),
    "float32": (problem, (9, 25608, torch.float32), {"temperature": 0.7, "logit_scale": 0.5}),
    "float32, read again": (problem, (6, 90004, torch.float32), {"reduction": "sum"}),
    "fewer rows than programs": (problem, (1, SHORT, torch.bfloat16), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", [next(iter(CASES)), *(pytest.param(x, marks=pytest.mark.slow) for x in [*CASES][1:])])
def test_emulated(name):
    """On 4 multiprocessors."""
    make, sizes, options = CASES[name]
    logits, target = make(*sizes)
    with emulating(["losses_once"]) as done:
        made = step(logits, target, **options)
    assert_right(made, logits, target, **options)
    (launch,) = done
    if name != next(iter(CASES)):
        assert all((a == b).all() for a, b in zip(launch.again(seed=1), launch.after, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu(name):
    make, (tokens, *sizes), options = CASES[name]
    for rows in {tokens, 1 + 4 * torch.cuda.get_device_properties(0).multi_processor_count} - {5 * tokens}:
        logits, target = make(rows, *sizes, "cuda")
        made = step(logits, target, **options)
        assert_right(made, logits, target, **options)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(made, step(logits, target, **options), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [x for x in CHECK_CASES if not x.options.get("label_smoothing")], ids=str)
def test_cases_gpu(case):
    """With a vocabulary that it serves, whatever the numbers: as exact as the kernel that reads them twice."""
    given = make_inputs(replace(case, vocab=max(case.vocab, SHORT), sliced=0))
    options = dict(case.options)
    for name in ("token_weight", "temperature", "class_weight"):
        if getattr(given, name) is not None:
            options[name] = torch.from_numpy(getattr(given, name)).cuda()
    if options.get("reduction") == "none":
        options["reduction"] = "mean"
    logits, target = torch.from_numpy(given.logits).cuda(), torch.from_numpy(given.target).cuda()
    made = [step(logits, target, **options)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onchip.vocab.rows.launches.row_rings", lambda vocab, size: None)
        made.append(step(logits.clone(), target, reduction=options.pop("reduction", "mean"), **options))
    (loss, grad), (expected, expected_grad) = made
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert (grad - expected_grad).norm() <= 1e-6 * expected_grad.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rings(dtype):
    size = DTYPE_BYTES[dtype]
    for vocab in (1000, 25608, SHORT, 65536, 128256, 131072, 151936, 201088, 262144, 1 << 20):
        rings = row_rings(vocab, size)
        if vocab * size < 100_000:
            assert rings is None
            continue
        tiles = -(-vocab // rings.TILE)
        assert tiles == rings.HELD + rings.RING
        assert vocab >= rings.HELD * rings.TILE
        assert rings.SLOTS * rings.TILE * size + 3072 <= 232448
        assert rings.SLOTS % rings.RING == 0 or rings.SLOTS < rings.RING


def test_what_it_serves():
    logits, target = problem(4, SHORT, torch.bfloat16)
    odd, _ = problem(4, SHORT + 4, torch.bfloat16)
    for given, options, serves in (
        (logits, {}, True),
        (logits, {"label_smoothing": 0.1}, False),
        (logits, {"class_weight": torch.rand(SHORT)}, True),  # which is one of tokens then
        (logits, {"return_stats": True}, False),
        (odd[:, :SHORT], {}, False),  # rows don't begin at multiples of 16 bytes
        (logits[:, :1000].contiguous(), {}, False),
    ):
        leaf = given.requires_grad_()
        with emulating() as done, pytest.MonkeyPatch.context() as patch:
            patch.setattr("onchip.kernels.triton.launch.Launch.run", lambda launch: done.append(launch.kernel))
            cross_entropy(leaf, target.clamp(max=given.shape[1] - 1), backend="triton", **options)
        assert ("losses_once" in {x.__name__ for x in done}) == serves
