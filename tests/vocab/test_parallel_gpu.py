"""A sharded vocabulary on CUDA devices: ranks that share one with gloo, or have one each over NCCL; a CUDA graph."""

import itertools

import pytest
import torch
import torch.distributed as dist
from parts import compare
from torch.nn.functional import linear

from onchip.torch import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from sharded import cut, leaf, spawn, spawn_on_gpus
from shared import capture, without_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]
TOKENS, HIDDEN, VOCAB = 700, 256, 5003
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RESTS = ("tail", "truncated", "renormalised")
OPTIONS = {
    "plain": {},
    "everything": {"softcap": 9.0, "label_smoothing": 0.1, "z_loss": 1e-3, "temperature": 0.7, "return_stats": True},
    "none": {"reduction": "none", "logit_scale": 0.5},
}
# A mean's gradient is below what float16 holds with all digits.
SUM = {"reduction": "sum"}


def layer(dtype=BF16):
    g = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, device="cuda", generator=g) for n in (TOKENS, VOCAB))
    target = torch.randint(VOCAB, (TOKENS,), device="cuda", generator=g)
    target[::7] = -100
    return (hidden / 4).to(dtype), weight.to(dtype), target


def within(output, gradient, same=0.99):
    """Numbers within a bound; of whole numbers a part that is the `same`, since two logits may be as large."""

    def near(got, expected, what, *_):
        if not got.is_floating_point():
            assert (got == expected).float().mean() > same, (what, float((got == expected).float().mean()))
        elif expected.numel():
            error = float((got.double() - expected.double()).norm() / expected.double().norm())
            assert error <= (output if what.startswith("output") else gradient), (what, error)

    return near


def of_logits(op, given, how, dtype, bounds):
    """A comparison with PyTorch's operations in float64 on all of the vocabulary."""
    if op is jsd:
        given = {"student_logits": given["logits"]} | {n: x for n, x in given.items() if n != "logits"}
    constants = [x for x in given if x == "teacher_logits"]
    return op, given, how, {"exact": F64, "near": within(*bounds), "constants": constants}


def of_head(op, given, how, dtype, bounds):
    """The same in float32, of a layer in this dtype."""
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    given = {n: x.to(dtype) if n in names else x for n, x in given.items()}
    if op is linear_jsd:
        given = {f"student_{n}" if n in names[:2] else n: x for n, x in given.items()}
    return op, given, how, {"exact": F32, "near": within(*bounds)}


def run(cases, layouts, rank, **more):
    for sizes, (op, given, how, of) in itertools.product(layouts, cases):
        compare(op, given, how, sizes, rank, times=1, **of | more)


BY_KERNELS = {"backend": "triton", "of_whole": {"backend": "plain"}}


def ids(rank, ranks):
    """Of one kind and several, of logits and of a layer."""
    hidden, weight, target = layer(F32)
    logits = linear(hidden, weight)
    one, several = {"logits": logits}, {"logits": logits, "ids": torch.stack([target, target.flip(0)], 1)}
    both = one | {"teacher_logits": logits.flip(0)}
    statistics = dict.fromkeys(("entropy", "lse", "mean_logits", "log_sum_sq_probs"), True)
    cases = [of_logits(cross_entropy, one | {"target": target}, how, F32, (1e-5, 1e-5)) for how in OPTIONS.values()]
    cases += [
        of_logits(op, given, how, F32, (1e-5, 2e-5))
        for op, given, how in (
            (log_probs, several, {"entropy": True, "top1": True, "softcap": 9.0}),
            (log_probs, several, statistics),
            (jsd, both | {"target": target}, {"beta": 0.0, "hard_weight": 0.2}),
            (jsd, both, {"beta": 0.4, "temperature": 2.0}),
        )
    ]
    run(cases, ([2600, 2403], [1, 5002], [VOCAB, 0]), rank, **BY_KERNELS)
    head = {"hidden": hidden, "weight": weight}
    cases = [
        of_head(linear_cross_entropy, head | {"target": target}, OPTIONS["everything"], BF16, (5e-3, 1e-2)),
        of_head(linear_cross_entropy, head | {"target": target}, OPTIONS["everything"] | SUM, F16, (5e-3, 1e-2)),
        *(of_head(linear_log_probs, head | {"ids": target}, {"entropy": True}, t, (5e-3, 1e-2)) for t in (BF16, F16)),
    ]
    run(cases, ([2600, 2403], [256, 4747], [VOCAB, 0]), rank, **BY_KERNELS)
    models = head | {"teacher_hidden": hidden.flip(0) / 2, "teacher_weight": weight.flip(0), "target": target}
    options = ({"beta": 0.0, "hard_weight": 0.2}, {"beta": 0.4, "temperature": 2.0}, {"beta": 1.0, "hard_weight": 0.5})
    cases = [
        of_head(linear_jsd, models, how | {"teacher_grad": True} | SUM, dtype, (1e-4, 6e-3 if dtype == BF16 else 2e-3))
        for dtype, how in itertools.product((BF16, F16), options)
    ]
    run(cases, ([2600, 2403], [256, 4747]), rank, **BY_KERNELS)


def soft_labels(rank, ranks):
    """Labels of K ids, labels for every entry by PyTorch's operations, and top-k teachers."""
    hidden, weight, _ = layer(F32)
    logits, head = linear(hidden, weight), {"hidden": hidden, "weight": weight}
    values, indices = logits.log_softmax(-1).topk(8)
    few, many = TopK(indices, values, "log_probs", "truncated"), (logits.flip(0) / 4).softmax(-1)
    options = SUM | {
        "softcap": 9.0,
        "z_loss": 1e-3,
        "class_weight": torch.rand(VOCAB, device="cuda"),
        "return_stats": True,
    }
    layouts, smoothed = ([2600, 2403], [VOCAB, 0]), options | {"label_smoothing": 0.1}
    for backend, labels, how, dtype, bound in (
        ("plain", few, options, F32, 2e-5),
        ("plain", many, options, F32, 2e-5),
        ("plain", many, options, F16, 5e-3),
        ("triton", few, options, BF16, 1e-2),
        ("triton", few, smoothed, BF16, 1e-2),
    ):
        case = of_head(linear_cross_entropy, head | {"target": labels}, how, dtype, (bound, bound))
        run([case], layouts, rank, backend=backend, of_whole={"backend": "plain"})
    calls = [(cross_entropy, few, "plain"), (cross_entropy, few, "triton"), (cross_entropy, many, "plain")]
    for op, labels, backend in (*calls, *((jsd, few._replace(rest=x), "auto") for x in RESTS)):
        labels = {"target" if op is cross_entropy else "teacher_topk": labels}
        case = of_logits(op, {"logits": logits} | labels, {"temperature": 2.0}, F32, (1e-5, 5e-5))
        run([case], layouts, rank, backend=backend, exact=None)
    wrong = few._replace(indices=indices.index_fill(0, torch.tensor([5], device="cuda"), VOCAB))
    for sizes in layouts:
        mine = leaf(logits[:, cut(sizes, rank)])
        given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": cut(sizes, rank).start}
        for loss in (
            cross_entropy(mine, wrong, reduction="none", backend="plain", **given),
            cross_entropy(mine, wrong, reduction="none", backend="triton", **given),
            jsd(mine, teacher_topk=wrong._replace(rest="tail"), reduction="none", **given),
        ):
            assert loss.isnan().nonzero()[:, 0].tolist() == [5]
            (gradient,) = torch.autograd.grad(loss.sum(), mine)
            assert not gradient[:5].isnan().any()


def by_kernels(rank, ranks):
    """Labels for every entry, and top-k teachers."""
    hidden, weight, target = layer(F32)
    logits, head = linear(hidden, weight), {"hidden": hidden, "weight": weight}
    many, (values, indices) = (logits.flip(0) / 2).softmax(-1), (logits.flip(0) / 2).log_softmax(-1).topk(24)
    everything = OPTIONS["everything"] | {"class_weight": torch.rand(VOCAB, device="cuda")}
    ways = {"beta": 0.0, "hard_weight": 0.3, "temperature": 2.0}, {"beta": 0.4}, {"beta": 1.0, "reduction": "none"}
    known = [
        ({"teacher_topk": TopK(indices, values, "log_probs", rest), "target": target}, how)
        for rest, how in zip(RESTS, ways, strict=True)
    ]
    cases = [
        of_logits(cross_entropy, {"logits": logits, "target": many}, how, F32, (2e-5, 2e-5))
        for how in ({}, everything, {"reduction": "none"})
    ]
    cases += [of_logits(jsd, {"logits": logits} | given, how, F32, (2e-5, 2e-5)) for given, how in known]
    for dtype, bounds in ((BF16, (5e-3, 1e-2)), (F16, (1e-3, 4e-3))):
        labels = head | {"target": many}
        cases += [of_head(linear_cross_entropy, labels, SUM | how, dtype, bounds) for how in ({}, everything)]
        cases += [of_head(linear_jsd, head | given, SUM | how, dtype, bounds) for given, how in known]
    uneven = [2600] + [0] * (ranks - 2) + [VOCAB - 2600] if ranks > 1 else [VOCAB]
    run(cases, (uneven, [VOCAB] + [0] * (ranks - 1)), rank, **BY_KERNELS)


def in_fp8(rank, ranks):
    """Against the same kernels on all of the vocabulary, whose blocks of 128 are those of the first shards."""
    hidden, weight, target = layer()
    given, kernels = {"hidden": hidden, "weight": weight}, {"precision": "fp8", "backend": "triton"}
    values, indices = linear(hidden, weight).float().log_softmax(-1).topk(8)
    few = TopK(indices, values, "log_probs", "truncated")
    # With other blocks other logits are the largest.
    aligned, other = {"near": within(1e-4, 5e-3)}, {"near": within(1e-2, 5e-2, same=0.9)}
    for labels, layouts, how in (
        (target, ([2560, 2443], [VOCAB, 0]), aligned),
        (few, ([2560, 2443], [VOCAB, 0]), aligned),
        (target, ([2600, 2403],), other),
    ):
        cases = [(linear_cross_entropy, given | {"target": labels}, x | kernels, how) for x in OPTIONS.values()]
        run(cases, layouts, rank)


@pytest.mark.parametrize("check", [ids, soft_labels, by_kernels, in_fp8], ids=lambda x: x.__name__)
def test_two_ranks_of_one_device(check, tmp_path):
    spawn(tmp_path, 2, {check.__name__: check}, timeout=300)


def test_labels_by_kernels_over_nccl(tmp_path):
    spawn_on_gpus(tmp_path, {"by_kernels": by_kernels}, timeout=300)


def over_nccl(rank, ranks):
    """Nothing synchronises, and a captured step follows its data."""
    group = dist.new_group(backend="nccl")
    hidden, weight, target = layer()
    h, w = leaf(hidden), leaf(weight)
    logits = linear(hidden, weight).requires_grad_()

    def of_layer():
        loss = linear_cross_entropy(h, w, target, vocab_group=group, z_loss=1e-3, backend="triton")
        return dict(zip("lhw", (loss.detach(), *torch.autograd.grad(loss, (h, w))), strict=True))

    def of_layer_in_fp8():
        loss = linear_cross_entropy(h, w, target, vocab_group=group, z_loss=1e-3, precision="fp8", backend="triton")
        return dict(zip("lhw", (loss.detach(), *torch.autograd.grad(loss, (h, w))), strict=True))

    def of_rows():
        loss = cross_entropy(logits, target, vocab_group=group, label_smoothing=0.1, backend="triton")
        return dict(zip("lx", (loss.detach(), *torch.autograd.grad(loss, logits)), strict=True))

    every, some = (
        torch.randn(TOKENS, VOCAB, device="cuda").softmax(-1),
        torch.randn(TOKENS, 4, device="cuda").softmax(-1),
    )
    few = TopK(torch.arange(4 * TOKENS, device="cuda").view(TOKENS, 4), some, "probs", "truncated")

    def of_labels():
        loss = linear_cross_entropy(h, w, every, vocab_group=group, label_smoothing=0.1)
        loss = loss + cross_entropy(logits, few, vocab_group=group, class_weight=some.new_ones(VOCAB))
        loss = loss + jsd(logits, teacher_topk=few._replace(values=some.log(), kind="log_probs"), vocab_group=group)
        loss = loss + linear_cross_entropy(h, w, few, vocab_group=group, backend="triton")
        known = few._replace(values=some.log(), kind="log_probs", rest="tail")
        loss = loss + linear_jsd(h, w, teacher_topk=known, vocab_group=group, backend="triton")
        return dict(zip("lhwx", (loss.detach(), *torch.autograd.grad(loss, (h, w, logits))), strict=True))

    for step in (of_layer, of_layer_in_fp8, of_rows, of_labels):
        step()  # which makes NCCL's communicator
        without_synchronisation(step)
        graph, captured = capture(step)
        with torch.no_grad():
            for x in (h, w, logits):
                x.mul_(-1.5)
            target[::3] = -100
        graph.replay()
        expected = step()
        for name, x in captured.items():
            assert torch.equal(x, expected[name]), (step.__name__, name)


def test_a_cuda_graph_over_nccl(tmp_path):
    spawn(tmp_path, 1, {"over_nccl": over_nccl}, timeout=300)
