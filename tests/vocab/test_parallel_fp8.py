"""precision='fp8' with a vocabulary that is sharded over two processes, compared with the same loss in one: if shards
begin at multiples of 128, both quantise the same blocks.
"""

from functools import partial
from unittest import mock

import parts
import pytest
import torch
import torch.distributed as dist
from parts import dense, exchanges, topk
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fp8_linear import fp8_interpreter
from linear_cross_entropy.lce_fp8_cases import GRADIENT_DB, LOSS_ERROR
from onchip.bench.torch_steps import peak_extra_bytes
from onchip.ops.fp8_linear.reference import snr_db
from onchip.ops.linear_cross_entropy import fp8_op
from onchip.torch import TopK, linear_cross_entropy, quantize_weight
from onchip.vocab.fp8 import memory, walk
from onchip.vocab.memory import Problem
from onchip.vocab.torch.dense import SENT
from sharded import cut, leaf, spawn

TOKENS, HIDDEN, VOCAB = (2, 150), 40, 300
LAYOUTS = ([128, 172], [256, 44], [0, 300])
EACH = torch.linspace(0.5, 1.5, 300).view(TOKENS)
OPTIONS = {
    "plain": {},
    "everything": {
        "softcap": 9.0, "logit_scale": 0.7, "label_smoothing": 0.1, "z_loss": 1e-3, "temperature": EACH.flip(0),
        "token_weight": EACH, "class_weight": torch.linspace(0, 2, VOCAB), "check_inputs": True,
    },
    "shift": {"shift": True, "normalizer": 200.0, "label_smoothing": 0.1},
}  # fmt: skip


def layer(dtype=torch.float32):
    """Hidden states, weight, bias and targets; an ignored token's hidden state is NaN, also where targets shift."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(*TOKENS, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g) / HIDDEN**0.5
    target = torch.randint(VOCAB, TOKENS, generator=g)
    target[:, ::7] = target[0, 8] = -100
    hidden[0, 7] = torch.nan
    return hidden.to(dtype), weight.to(dtype), torch.randn(VOCAB, generator=g).to(dtype), target


def in_fp8(hidden, weight, target, bias=None, **options):
    return linear_cross_entropy(hidden, weight, target, bias, precision="fp8", **options)


def taken(sizes, rank, **options):
    """What a rank passes beside the layer."""
    return options | {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": cut(sizes, rank).start}


def near(got, expected, what, bound=3e-3):
    """A number that is nearly between two of E4M3 may come out as the one or the other."""
    assert got.dtype == expected.dtype, what
    error = (got.double() - expected.double()).norm()
    assert error <= bound * expected.double().norm(), (what, float(error / expected.double().norm()))


def of_both(got, expected, what, *_):
    """Outputs are those of the same numbers."""
    if got.is_floating_point():
        near(got, expected, what, 2e-5 if what.startswith("output") else 3e-3)
    else:
        assert torch.equal(got, expected), what


def compare(sizes, rank, options, labels=None, dtype=torch.float32, **more):
    """Everything of the shards against the whole; `more` is of the sharded call."""
    given = dict(zip(("hidden", "weight", "bias", "target"), layer(dtype), strict=True))
    if options.get("reduction") == "none":
        del given["bias"]
    if labels is not None:
        given |= {"hidden": given["hidden"].nan_to_num(), "target": labels(vocab=VOCAB, shape=TOKENS)}
    how = options | {"precision": "fp8", "return_stats": True}
    parts.compare(linear_cross_entropy, given, how, sizes, rank, near=of_both, **more)


SOFT = partial(topk, "log_probs"), dense


def every_option_in_every_layout(rank, ranks):
    for sizes in LAYOUTS:
        for options in OPTIONS.values():
            compare(sizes, rank, options)
        for labels in SOFT:
            compare(sizes, rank, OPTIONS["everything"], labels)


def every_option(rank, ranks):
    """Each kind of labels in one layout after the other."""
    for sizes, options in zip(LAYOUTS, OPTIONS.values(), strict=True):
        compare(sizes, rank, options)
    compare(LAYOUTS[0], rank, {"reduction": "none", "z_loss": 1e-2})
    compare(LAYOUTS[0], rank, {}, dtype=torch.bfloat16)
    compare([VOCAB, 0], rank, OPTIONS["everything"], size=256)  # rows of padding, which nobody may read
    for labels, sizes in zip(SOFT, LAYOUTS[1:], strict=True):
        compare(sizes, rank, OPTIONS["everything"], labels)
        with mock.patch.object(memory, "DEFAULT_CHUNK", 128):
            compare(LAYOUTS[0], rank, {"reduction": "none"}, labels)


def chunks_and_one_exchange(rank, ranks):
    """Logits that are made again are the same, and statistics are exchanged once."""
    hidden, weight, bias, target = layer()
    own, made, biases = cut(LAYOUTS[0], rank), [], []
    for chunk in (2048, 64):
        with mock.patch.object(memory, "DEFAULT_CHUNK", chunk), exchanges() as seen:
            leaves = [leaf(x) for x in (hidden, weight[own], bias[own])]
            loss = in_fp8(leaves[0], leaves[1], target, leaves[2], softcap=9.0, **taken(LAYOUTS[0], rank))
            loss.backward()
            made.append([loss, *(x.grad for x in leaves[:2])])
            biases.append(leaves[2].grad)
        assert len(seen) == 1
    assert all(map(torch.equal, *made))
    near(*biases, "bias", 1e-5)  # summed in another order


def other_calls(rank, ranks):
    """Shards that begin anywhere, quantised weights, tokens by rank, partial sums, memory of the caller's."""
    hidden, weight, _, target = layer()
    hidden = hidden.nan_to_num()
    whole = [leaf(hidden), leaf(weight)]
    exact = linear_cross_entropy(*whole, target)
    exact.backward()
    sizes = [77, 223]
    mine = [leaf(hidden), leaf(weight[cut(sizes, rank)])]
    loss = in_fp8(*mine, target, **taken(sizes, rank))
    loss.backward()
    assert abs(loss - exact) <= LOSS_ERROR * exact
    assert snr_db(mine[0].grad, whole[0].grad) >= GRADIENT_DB
    assert snr_db(mine[1].grad, whole[1].grad[cut(sizes, rank)]) >= GRADIENT_DB

    whole = [leaf(hidden), leaf(weight)]
    expected = in_fp8(*whole, target)
    expected.backward()
    sizes = LAYOUTS[1]
    own, given = cut(sizes, rank), taken(sizes, rank)
    for part in (quantize_weight(leaf(weight[own])), weight[own]):
        h = leaf(hidden)
        loss = in_fp8(h, part, target, reduce_hidden_grad=False, **given)
        loss.backward()
        dist.all_reduce(h.grad)
        near(loss, expected, "partial", 2e-5), near(h.grad, whole[0].grad, "partial")
    out, h = torch.ones(sizes[rank], HIDDEN), leaf(hidden[:, rank * 75 : rank * 75 + 75])
    in_fp8(h, leaf(weight[own]), target, weight_grad_out=out, hidden_layout="sequence", **given).backward()
    near(out - 1, whole[1].grad[own], "weight_grad_out"), near(h.grad, whole[0].grad.chunk(2, 1)[rank], "sequence")

    h, w = leaf(hidden[:, :0]), leaf(weight[own])
    nothing = in_fp8(h, w, target[:, :0], **given)
    nothing.backward()
    assert nothing == 0
    assert not w.grad.any()

    mesh = init_device_mesh("cpu", (2,))
    w = distribute_tensor(weight[:256], mesh, [Shard(0)]).requires_grad_()
    h = distribute_tensor(hidden, mesh, [Replicate()]).requires_grad_()
    small = [leaf(hidden), leaf(weight[:256])]
    in_fp8(h, w, target % 256).backward(), in_fp8(*small, target % 256).backward()
    near(h.grad.full_tensor(), small[0].grad, "DTensor"), near(w.grad.full_tensor(), small[1].grad, "DTensor")

    for wrong, kind, match in (
        ({"strategy": "recompute"}, ValueError, "precision='fp8' computes logits once"),
        ({"hidden": hidden.double(), "weight": weight[own].double()}, TypeError, "takes no float64"),
        ({"backend": "triton"}, ValueError, "backend 'triton' can't run this call"),
        ({"scratch_bytes": 8}, ValueError, "scratch_bytes=8 is too small"),
        (
            {"target": torch.rand(*TOKENS, VOCAB)[..., own], "backend": "triton"},
            ValueError,
            "all entries take no sharded",
        ),
        ({"target": target.masked_fill(target < 0, VOCAB)}, ValueError, r"target\[0, 0\] is 300, which is neither"),
        ({"vocab_start": 0}, ValueError, r"don't make up \[0, 300\)"),
    ):
        with pytest.raises(kind, match="linear_cross_entropy: .*" + match):
            in_fp8(**{"hidden": hidden, "weight": weight[own], "target": target} | given | wrong)
    padding = torch.nn.functional.pad(weight, (0, 0, 0, 212))
    made = quantize_weight(leaf(padding.chunk(2)[rank]))
    with pytest.raises(ValueError, match="weight was quantised with 212 rows of padding, which would share"):
        in_fp8(hidden, made, target, vocab_group=dist.group.WORLD, vocab_size=VOCAB)


def memory_that_it_takes(rank, ranks):
    """In two chunks, whose logits are made twice; of targets, and of both kinds of soft labels."""
    tokens, hidden, vocab = 512, 64, 4096
    h, w, target = (
        leaf(torch.randn(tokens, hidden)),
        leaf(torch.randn(ranks * vocab, hidden)[cut([vocab] * ranks, rank)]),
        torch.arange(tokens),
    )
    ids = torch.arange(5 * tokens).view(tokens, 5)
    several = TopK(ids, torch.full(ids.shape, 0.1), "probs", "truncated")
    for labels, numbers, known in (
        (target, 1, {}),
        (several, 5, {"ids": 5}),
        (torch.full((tokens, vocab), 1e-4), SENT, {"labels": "float32"}),
    ):
        sent = (numbers + 8) * tokens * (ranks + 1) * 4
        budget = memory.scratch_bytes(Problem(tokens, hidden, vocab, sharded=True, copied=sent, **known), 256)

        def step(labels=labels, budget=budget):
            loss = in_fp8(h, w, labels, scratch_bytes=budget, strategy="stash", vocab_group=dist.group.WORLD)
            return [loss.detach(), *torch.autograd.grad(loss, (h, w))]

        step()
        taken = peak_extra_bytes(step, device="cpu")
        assert taken <= budget, (type(labels), taken, budget)


CHECKS = (memory_that_it_takes, every_option, chunks_and_one_exchange, other_calls)


def test_two_ranks(tmp_path):
    spawn(tmp_path, 2, {check.__name__: check for check in CHECKS})


@pytest.mark.slow
def test_every_layout(tmp_path):
    spawn(tmp_path, 2, {"every option": every_option_in_every_layout})


def kernels(rank, ranks):
    """As PyTorch's operations on all of the vocabulary."""
    fp8_interpreter.mend()
    with (
        mock.patch.object(fp8_op, "refusals", return_value={"plain": None, "triton": None}),
        mock.patch.object(walk, "LOGITS", torch.float32),
    ):
        for labels in (None, topk):
            compare(LAYOUTS[0], rank, OPTIONS["everything"], labels, backend="triton")


@pytest.mark.slow
def test_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"kernels": kernels})
