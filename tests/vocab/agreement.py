"""What ranks of a sharded vocabulary are given must match; the CPU checks it, whatever check_inputs is."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from onchip.torch import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs

TOKENS, HIDDEN, VOCAB = (2, 3), 128, 24


def problem():
    """The whole problem, the same on each rank."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(*TOKENS, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g)
    ids = torch.randint(VOCAB, TOKENS, generator=g)
    ids[1, 2] = -100
    return hidden, weight, ids


def few(kind, rest):
    indices = torch.arange(4).expand(*TOKENS, 4)
    return TopK(indices, torch.full((*TOKENS, 4), -2.0 if kind == "log_probs" else 0.2), kind, rest)


def dense(rows):
    """Soft labels of these entries."""
    return torch.arange(rows.stop - rows.start).float().expand(*TOKENS, -1).softmax(-1)


def of_layers(ids):
    """Every loss of a linear layer, as a function of hidden, a weight's rows, and which they are."""
    known = few("log_probs", "tail")
    return {
        "cross-entropy": lambda h, w, rows, **x: linear_cross_entropy(h, w[rows], ids, **x),
        "fp8": lambda h, w, rows, **x: linear_cross_entropy(h, w[rows], ids, precision="fp8", **x),
        "k labels": lambda h, w, rows, **x: linear_cross_entropy(h, w[rows], few("probs", "truncated"), **x),
        "dense labels": lambda h, w, rows, **x: linear_cross_entropy(h, w[rows], dense(rows), **x),
        "log-probs": lambda h, w, rows, **x: linear_log_probs(h, w[rows], ids, **x).sum(),
        "k log-probs": lambda h, w, rows, **x: linear_log_probs(h, w[rows], torch.stack([ids, ids], -1), **x).sum(),
        "jsd": lambda h, w, rows, **x: linear_jsd(h, w[rows], h.flip(-1), w[rows], target=ids, **x),
        "top-k teacher": lambda h, w, rows, **x: linear_jsd(h, w[rows], teacher_topk=known, target=ids, **x),
    }


def of_logits(ids):
    """Every loss of logits, as a function of columns of them."""
    return {
        "cross-entropy": lambda z, rows, **x: cross_entropy(z[..., rows], ids, **x),
        "k labels": lambda z, rows, **x: cross_entropy(z[..., rows], few("probs", "truncated"), **x),
        "dense labels": lambda z, rows, **x: cross_entropy(z[..., rows], dense(rows), **x),
        "log-probs": lambda z, rows, **x: log_probs(z[..., rows], ids, **x),
        "jsd": lambda z, rows, **x: jsd(z[..., rows], z.flip(-2)[..., rows], **x),
        "top-k teacher": lambda z, rows, **x: jsd(z[..., rows], teacher_topk=few("log_probs", "tail"), **x),
    }


def mine(rank, ranks):
    size = VOCAB // ranks
    return slice(rank * size, (rank + 1) * size)


def shards_that_are_the_whole(rank, ranks):
    hidden, weight, ids = problem()
    for op in of_layers(ids).values():
        with pytest.raises(ValueError, match=r"weight is the same on ranks 0 and 1 of vocab_group.*weight.chunk\(\d\)"):
            op(hidden, weight, slice(0, VOCAB), vocab_group=dist.group.WORLD)
        op(hidden, weight, mine(rank, ranks), vocab_group=dist.group.WORLD)
    logits = hidden @ weight.T
    for op in of_logits(ids).values():
        with pytest.raises(ValueError, match=r"logits is the same on ranks 0 and 1 .*logits.chunk\(\d, -1\)\[rank\]"):
            op(logits, slice(0, VOCAB), vocab_group=dist.group.WORLD)
        op(logits, mine(rank, ranks), vocab_group=dist.group.WORLD)


def shards_of_one_number(rank, ranks):
    """A new head may be all zeros."""
    hidden, weight, ids = problem()
    loss = linear_cross_entropy(hidden, torch.zeros_like(weight)[: VOCAB // ranks], ids, vocab_group=dist.group.WORLD)
    torch.testing.assert_close(loss, torch.tensor(float(VOCAB)).log())


def shards_that_are_equal(rank, ranks):
    """As those of a framework that draws each rank's part with one seed; the call says that they are parts."""
    hidden, weight, ids = problem()
    part = weight[: VOCAB // ranks]
    loss = linear_cross_entropy(hidden, part, ids, vocab_group=dist.group.WORLD, vocab_size=VOCAB)
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, torch.cat([part] * ranks), ids))


def hidden_states_that_differ(rank, ranks):
    hidden, weight, ids = problem()
    given = {"vocab_group": dist.group.WORLD}
    other, rounded, ignored = hidden.clone(), hidden * (1 + rank * 1e-6), hidden.clone()
    other[1, 0] += rank * torch.randn(HIDDEN)
    ignored[1, 2] = rank * torch.nan
    for name, op in of_layers(ids).items():
        run = partial(op, w=weight, rows=mine(rank, ranks), **given)
        with pytest.raises(
            ValueError, match=r"hidden\[1, 0\] differs between ranks 0 and 1 .*hidden_layout='sequence'"
        ):
            run(other)
        expected = run(hidden)
        torch.testing.assert_close(run(rounded), expected, rtol=1e-4, atol=1e-4)
        if "labels" not in name and name != "fp8":
            assert torch.equal(run(ignored), expected)
    bfloat16 = (x.bfloat16() for x in (other, weight[mine(rank, ranks)]))
    with pytest.raises(ValueError, match=r"hidden\[1, 0\] differs"):
        linear_cross_entropy(*bfloat16, ids, **given)


CHECKS = (shards_that_are_the_whole, shards_of_one_number, shards_that_are_equal, hidden_states_that_differ)
