"""A sharded vocabulary on CUDA devices: two ranks that share one with gloo, and a CUDA graph over NCCL."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from onchip.torch import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from sharded import cut, leaf, same_bits, spawn, spawn_on_gpus
from shared import capture, without_synchronisation

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]
TOKENS, HIDDEN, VOCAB = 700, 256, 5003
RESTS = ("tail", "truncated", "renormalised")
OPTIONS = {
    "plain": {},
    "everything": {"softcap": 9.0, "label_smoothing": 0.1, "z_loss": 1e-3, "temperature": 0.7, "return_stats": True},
    "none": {"reduction": "none", "logit_scale": 0.5},
}


def layer(dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, device="cuda", generator=g) for n in (TOKENS, VOCAB))
    target = torch.randint(VOCAB, (TOKENS,), device="cuda", generator=g)
    target[::7] = -100
    return (hidden / 4).to(dtype), weight.to(dtype), target


def values_of(made):
    """The tensors of an output."""
    return [made] if isinstance(made, torch.Tensor) else [y for x in made if x is not None for y in values_of(x)]


def near(got, expected, bound, what, *, same=0.99):
    """Numbers within a bound; of whole numbers a part that is the `same`, since two logits may be as large."""
    for a, b in zip(got, expected, strict=True):
        if a.is_floating_point():
            error = (a.double() - b.double()).norm() / b.double().norm()
            assert error <= bound, (what, float(error))
        else:
            assert (a == b).float().mean() > same, (what, float((a == b).float().mean()))


def of_logits(rank, ranks):
    """By kernels, against PyTorch's operations in float64 on all of the vocabulary."""
    hidden, weight, target = layer(torch.float32)
    logits = linear(hidden, weight)
    for sizes in ([2600, 2403], [1, 5002], [VOCAB, 0]):
        own = cut(sizes, rank)
        given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": own.start, "backend": "triton"}
        for name, options in OPTIONS.items():
            whole, mine = leaf(logits.double()), leaf(logits[:, own])
            expected = values_of(cross_entropy(whole, target, backend="plain", **options))
            got = values_of(cross_entropy(mine, target, **options, **given))
            same_bits(*got)
            near(got, expected, 1e-5, name)
            expected[0].sum().backward(), got[0].sum().backward()
            if mine.numel():
                near([mine.grad], [whole.grad[:, own]], 1e-5, name)
        several = torch.stack([target, target.flip(0)], 1)
        for op, more, options in (
            (log_probs, (several,), {"entropy": True, "top1": True, "softcap": 9.0}),
            (log_probs, (several,), dict.fromkeys(("entropy", "lse", "mean_logits", "log_sum_sq_probs"), True)),
            (jsd, (logits.flip(0),), {"beta": 0.0, "target": target, "hard_weight": 0.2}),
            (jsd, (logits.flip(0),), {"beta": 0.4, "temperature": 2.0}),
        ):
            whole, mine = leaf(logits.double()), leaf(logits[:, own])
            exact = [x.double() if x.is_floating_point() else x for x in more]
            expected = values_of(op(whole, *exact, backend="plain", **options))
            got = values_of(op(mine, *(x[:, own] if op is jsd else x for x in more), **options, **given))
            same_bits(*got)
            near(got, expected, 1e-5, op.__name__)
            expected[0].sum().backward(), got[0].sum().backward()
            if mine.numel():
                near([mine.grad], [whole.grad[:, own]], 2e-5, op.__name__)


def of_hidden_states(rank, ranks):
    hidden, weight, target = layer()
    for sizes in ([2600, 2403], [256, 4747], [VOCAB, 0]):
        own = cut(sizes, rank)
        given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": own.start, "backend": "triton"}
        for op, options, dtype in (
            (linear_cross_entropy, OPTIONS["everything"], torch.bfloat16),
            (linear_cross_entropy, OPTIONS["everything"] | {"reduction": "sum"}, torch.float16),
            (linear_log_probs, {"entropy": True}, torch.bfloat16),
            (linear_log_probs, {"entropy": True}, torch.float16),
        ):
            rounded = [x.to(dtype) for x in (hidden, weight)]
            whole, mine = [leaf(x.float()) for x in rounded], [leaf(rounded[0]), leaf(rounded[1][own])]
            expected = values_of(op(*whole, target, backend="plain", **options))
            got = values_of(op(*mine, target, **options, **given))
            same_bits(*got)
            near(got, expected, 5e-3, op.__name__)
            expected[0].sum().backward(), got[0].sum().backward()
            right = [whole[0].grad, whole[1].grad[own]]
            for a, b in zip(mine, right, strict=True):
                if a.numel():
                    near([a.grad], [b], 1e-2, f"{op.__name__} {dtype} {sizes}")
        if not sizes[1]:
            continue
        for dtype, options in itertools.product(
            (torch.bfloat16, torch.float16),
            ({"beta": 0.0, "hard_weight": 0.2}, {"beta": 0.4, "temperature": 2.0}, {"beta": 1.0, "hard_weight": 0.5}),
        ):
            options = options | {"target": target, "teacher_grad": True, "reduction": "sum"}
            rounded = [x.to(dtype) for x in (hidden, weight, hidden.flip(0) / 2, weight.flip(0))]
            whole = [leaf(x.float()) for x in rounded]
            mine = [leaf(x if i in (0, 2) else x[own]) for i, x in enumerate(rounded)]
            expected, got = linear_jsd(*whole, backend="plain", **options), linear_jsd(*mine, **options, **given)
            same_bits(got)
            near([got], [expected], 1e-4, f"linear_jsd {options}")
            expected.backward(), got.backward()
            right = [x.grad if i in (0, 2) else x.grad[own] for i, x in enumerate(whole)]
            near([x.grad for x in mine], right, 6e-3 if dtype == torch.bfloat16 else 2e-3, f"linear_jsd {options}")


def soft_labels(rank, ranks):
    """By PyTorch's operations, labels of K ids by kernels too, and top-k teachers; against all of the vocabulary."""
    hidden, weight, _ = layer(torch.float32)
    logits = linear(hidden, weight)
    values, ids = logits.log_softmax(-1).topk(8)
    few, many = TopK(ids, values, "log_probs", "truncated"), (logits.flip(0) / 4).softmax(-1)
    options = {"softcap": 9.0, "z_loss": 1e-3, "class_weight": torch.rand(VOCAB, device="cuda"), "return_stats": True}
    options["reduction"] = "sum"  # a mean's gradient is below what float16 holds with all digits
    for sizes in ([2600, 2403], [VOCAB, 0]):
        own = cut(sizes, rank)
        given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": own.start}
        for backend, dtype, labels, bound, smoothing in (
            ("plain", torch.float32, few, 2e-5, 0.0),
            ("plain", torch.float32, many, 2e-5, 0.0),
            ("plain", torch.float16, many, 5e-3, 0.0),
            ("triton", torch.bfloat16, few, 1e-2, 0.0),
            ("triton", torch.bfloat16, few, 1e-2, 0.1),
        ):
            what, options["label_smoothing"] = f"{backend} {dtype} {sizes} {smoothing}", smoothing
            rounded = [x.to(dtype) for x in (hidden, weight)]
            whole, mine = [leaf(x.float()) for x in rounded], [leaf(rounded[0]), leaf(rounded[1][own])]
            expected = values_of(linear_cross_entropy(*whole, labels, backend="plain", **options))
            part = labels if labels is few else labels[:, own]
            got = values_of(linear_cross_entropy(*mine, part, backend=backend, **options, **given))
            same_bits(*got)
            near(got, expected, bound, what)
            expected[0].backward(), got[0].backward()
            near([mine[0].grad], [whole[0].grad], bound, what)
            if mine[1].numel():
                near([mine[1].grad], [whole[1].grad[own]], bound, what)
        of_logits = [(cross_entropy, few, "plain"), (cross_entropy, few, "triton"), (cross_entropy, many, "plain")]
        for op, labels, backend in (*of_logits, *((jsd, few._replace(rest=x), "auto") for x in RESTS)):
            whole, mine = leaf(logits), leaf(logits[:, own])
            part = labels[:, own] if labels is many else labels
            name = "target" if op is cross_entropy else "teacher_topk"
            expected = op(whole, **{name: labels}, temperature=2.0)
            got = op(mine, **{name: part}, temperature=2.0, backend=backend, **given)
            same_bits(got)
            near([got], [expected], 1e-5, op.__name__)
            expected.backward(), got.backward()
            if mine.numel():
                near(
                    [mine.grad], [whole.grad[:, own]], 5e-5, f"{op.__name__} {labels[3] if labels is not many else ''}"
                )
        wrong = few._replace(indices=ids.index_fill(0, torch.tensor([5], device="cuda"), VOCAB))
        mine = leaf(logits[:, own])
        for loss in (
            cross_entropy(mine, wrong, reduction="none", backend="plain", **given),
            cross_entropy(mine, wrong, reduction="none", backend="triton", **given),
            jsd(mine, teacher_topk=wrong._replace(rest="tail"), reduction="none", **given),
        ):
            assert loss.isnan().nonzero()[:, 0].tolist() == [5]
            (gradient,) = torch.autograd.grad(loss.sum(), mine)
            assert not gradient[:5].isnan().any()


def test_soft_labels_of_two_ranks(tmp_path):
    spawn(tmp_path, 2, {"soft_labels": soft_labels}, timeout=300)


def by_kernels(rank, ranks):
    """Labels for every entry, and top-k teachers, against PyTorch's operations on all of the vocabulary."""
    hidden, weight, target = layer(torch.float32)
    logits = linear(hidden, weight)
    many, (values, ids) = (logits.flip(0) / 2).softmax(-1), (logits.flip(0) / 2).log_softmax(-1).topk(24)
    everything = OPTIONS["everything"] | {"class_weight": torch.rand(VOCAB, device="cuda")}
    teachers = [
        {"teacher_topk": TopK(ids, values, "log_probs", rest), "target": target} | options
        for rest, options in zip(
            RESTS,
            ({"beta": 0.0, "hard_weight": 0.3, "temperature": 2.0}, {"beta": 0.4}, {"beta": 1.0, "reduction": "none"}),
            strict=True,
        )
    ]
    calls = [(cross_entropy, {"target": many} | more) for more in ({}, everything, {"reduction": "none"})]
    calls += [(jsd, teacher) for teacher in teachers]
    of_heads = [(linear_cross_entropy, {"target": many} | more) for more in ({}, everything)]
    of_heads += [(linear_jsd, teacher) for teacher in teachers]
    for sizes in ([2600] + [0] * (ranks - 2) + [VOCAB - 2600] if ranks > 1 else [VOCAB], [VOCAB] + [0] * (ranks - 1)):
        own = cut(sizes, rank)
        given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": own.start, "backend": "triton"}

        def compare(op, parameters, dtype, options, bounds, own=own, given=given, sizes=sizes):
            part = {n: x[:, own] if x is many else x for n, x in options.items()}
            exact = torch.float32 if len(parameters) > 1 else torch.float64
            whole, mine = [leaf(x.to(dtype).to(exact)) for x in parameters], [leaf(x.to(dtype)) for x in parameters]
            mine = [leaf(x[own] if x.shape[0] == VOCAB else x[:, own] if x.shape[1] == VOCAB else x) for x in mine]
            expected, got = values_of(op(*whole, backend="plain", **options)), values_of(op(*mine, **part, **given))
            same_bits(*got)
            what = f"{op.__name__} {dtype} {sizes} {[*options]}"
            near(got, expected, bounds[0], what)
            expected[0].sum().backward(), got[0].sum().backward()
            for a, b in zip(mine, whole, strict=True):
                if a.numel():
                    right = b.grad if a.shape == b.shape else b.grad[own] if len(b) == VOCAB else b.grad[:, own]
                    near([a.grad], [right], bounds[1], what)

        for op, options in calls:
            compare(op, [logits], torch.float32, options, (2e-5, 2e-5))
        for dtype, bounds in ((torch.bfloat16, (5e-3, 1e-2)), (torch.float16, (1e-3, 4e-3))):
            for op, options in of_heads:
                compare(op, [hidden, weight], dtype, {"reduction": "sum"} | options, bounds)


def test_labels_by_kernels(tmp_path):
    spawn(tmp_path, 2, {"by_kernels": by_kernels}, timeout=300)


def test_labels_by_kernels_over_nccl(tmp_path):
    spawn_on_gpus(tmp_path, {"by_kernels": by_kernels}, timeout=300)


def in_fp8(rank, ranks):
    """Against the same kernels on all of the vocabulary, whose blocks of 128 are those of the first shards."""
    hidden, weight, target = layer()
    given = {"precision": "fp8", "backend": "triton"}
    values, ids = linear(hidden, weight).float().log_softmax(-1).topk(8)
    few = TopK(ids, values, "log_probs", "truncated")
    ways = ([2560, 2443], 5e-3, target), ([2600, 2403], 5e-2, target), ([VOCAB, 0], 5e-3, target)
    for sizes, bound, labels in (*ways, ([2560, 2443], 5e-3, few), ([VOCAB, 0], 5e-3, few)):
        own = cut(sizes, rank)
        shards = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": own.start}
        for name, options in OPTIONS.items():
            whole, mine = [leaf(x) for x in (hidden, weight)], [leaf(hidden), leaf(weight[own])]
            expected = values_of(linear_cross_entropy(*whole, labels, **options, **given))
            got = values_of(linear_cross_entropy(*mine, labels, **options, **shards, **given))
            same_bits(*got)
            # With other blocks other logits are the largest.
            aligned = bound == 5e-3
            near(got, expected, 1e-4 if aligned else 1e-2, name, same=0.99 if aligned else 0.9)
            expected[0].sum().backward(), got[0].sum().backward()
            near([mine[0].grad], [whole[0].grad], bound, name)
            if sizes[rank]:
                near([mine[1].grad], [whole[1].grad[own]], bound, name)


def test_two_ranks_of_one_device(tmp_path):
    spawn(tmp_path, 2, {check.__name__: check for check in (of_logits, of_hidden_states)}, timeout=300)


def test_two_ranks_of_one_device_in_fp8(tmp_path):
    spawn(tmp_path, 2, {"in_fp8": in_fp8}, timeout=300)


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
