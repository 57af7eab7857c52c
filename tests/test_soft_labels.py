"""Cross-entropies whose targets are probabilities, for K ids or for every entry: compared with the oracle, which is
compared with PyTorch.  test_every_loss.py has what holds for every op.
"""

import math
import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from loss_checks import RIGHT
from losses import CE, LCE, VOCAB
from onchip.bench.torch_steps import peak_extra_bytes
from onchip.torch import CrossEntropyLoss, TopK, cross_entropy, linear_cross_entropy
from shared import pairs_once
from soft_labels import assert_right, class_weights, everything, oracle, problem, right_stats

pytestmark = pytest.mark.usefixtures("unwritten_memory_shows")
FORMS = ("probs", "log_probs", "dense")
by_form = pytest.mark.parametrize("form", FORMS)
OPS = LCE, CE
by_op = pytest.mark.parametrize("loss", OPS, ids=["linear_cross_entropy", "cross_entropy"])


@by_op
@pytest.mark.parametrize("reduction", ["mean", "none"])
@by_form
def test_values(loss, form, reduction):
    for options in ({}, everything(reduction), {"label_smoothing": 1.0}):
        assert_right(loss, problem(loss, form), reduction=reduction, scale=2, **options)
    for dtype in (torch.bfloat16, torch.float16):
        given = problem(loss, form, dtype=dtype)
        assert_right(loss, given, reduction=reduction, scale=2, bound=RIGHT[dtype], **everything(reduction))


@by_op
@by_form
@pytest.mark.parametrize("options", [{}, everything("none")], ids=["plain", "everything"])
def test_statistics(loss, form, options):
    """Of the labels as they are given, without smoothing and weights of classes.  They change nothing else."""
    given, options = problem(loss, form), options | {"reduction": "none"}
    leaves = [x for x in given.values() if torch.is_tensor(x) and x.requires_grad]
    made, stats = loss.op(**given, **options, return_stats=True)
    expected = loss.op(**given, **options)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)
    a, b = (torch.autograd.grad(x.sum(), leaves) for x in (made, expected))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for name, x in right_stats(loss, given, **options).items():
        found = getattr(stats, name)
        assert found.shape == (2, 12)
        assert not found.requires_grad
        if name in ("correct", "argmax"):
            assert torch.equal(found, x), name
        else:
            torch.testing.assert_close(found.double(), x, rtol=2e-6, atol=2e-6, msg=name)
    if loss is LCE:
        _, shifted = loss.op(**given, shift=True, return_stats=True)
        assert shifted.argmax[:, -1].tolist() == [-1, -1]
        assert not shifted.lse[:, -1].any()
        assert not shifted.correct[:, -1].any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deterministic")
@by_op
@by_form
@pytest.mark.parametrize("dtype", RIGHT, ids=str)
def test_values_on_the_gpu(loss, form, dtype):
    """The kernels for products take 16 bits alone."""
    loss = replace(loss, device="cuda")
    given, options = problem(loss, form, dtype=dtype), everything("none", "cuda")
    without = everything("mean", "cuda") | {"label_smoothing": 0.0}
    for reduction, more in (("mean", {}), ("none", options), ("mean", without)):
        backend = "auto" if loss.linear and dtype == torch.float32 else "triton"
        assert_right(loss, given, reduction=reduction, scale=2, bound=RIGHT[dtype], backend=backend, **more)


@pytest.mark.gpu
@pairs_once("loss, form, vocab", product(OPS, FORMS, [VOCAB, 20000]))
def test_statistics_on_the_gpu(loss, form, vocab):
    loss = replace(loss, device="cuda")
    given = problem(loss, form, vocab=vocab, dtype=torch.bfloat16)
    _, stats = loss.op(**given, softcap=5.0, return_stats=True, backend="triton")
    for name, x in right_stats(loss, given, softcap=5.0).items():
        torch.testing.assert_close(getattr(stats, name), x.detach(), rtol=2e-5, atol=2e-5, check_dtype=False)


@pytest.mark.gpu
@pairs_once(
    "loss, form, size, dtype",
    product(OPS, ["dense", "probs"], [(520, 8192), (515, 20011)], [torch.bfloat16, torch.float16]),
)
def test_kernels_of_many_tiles(loss, form, size, dtype):
    """Many tiles, aligned or not, of labels in float32; and the same from each of several calls, the later ones of
    which repeat what an earlier one launched.  And no more memory than the formula says."""
    (hidden, vocab), loss = size, replace(loss, device="cuda")
    if not loss.linear and dtype == torch.float16:
        dtype = torch.float32  # a mean's gradients of 1e-7 are below float16's normal numbers
    given = loss.problem((4, 175), hidden, vocab, dtype=dtype)
    given["target"] = torch.randn(4, 175, vocab, device="cuda").mul_(3).softmax(-1)
    if form == "probs":
        values, indices = given["target"].topk(20)
        indices[..., 7] = indices[..., 3]
        given["target"] = TopK(indices, values, "probs", "truncated")
    if loss.linear:
        with torch.no_grad():
            given["weight"] *= 0.1
    options = {"softcap": 8.0, "label_smoothing": 0.1, "class_weight": class_weights(vocab, "cuda"), "z_loss": 1e-3}
    assert_right(loss, given, scale=2, bound=RIGHT[dtype], backend="triton", **options)
    leaves = [x for name, x in given.items() if name != "target" and x.requires_grad]

    def step(scratch_bytes=None):
        made = loss.op(**given, **options, backend="triton", scratch_bytes=scratch_bytes)
        return torch.autograd.grad(made, leaves)

    first = step()
    for _ in range(4):
        assert all(map(torch.equal, step(), first))
    least = _least(loss, given, options | {"backend": "triton"})
    for a, b in zip(step(least), first, strict=True):
        assert (a.double() - b.double()).norm() <= (RIGHT[dtype] or 1e-5) * b.double().norm()
    assert peak_extra_bytes(partial(step, least), device="cuda") <= least


@by_op
@by_form
def test_the_oracle_is_pytorchs(loss, form):
    given = {
        n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in problem(loss, form).items()
    }
    leaves = {n: x.detach().requires_grad_() for n, x in given.items() if n != "target"}
    z = (F.linear(*leaves.values()) if loss.linear else leaves["logits"]).flatten(0, 1)
    options = {"label_smoothing": 0.1, "class_weight": class_weights(VOCAB).double()}
    right = oracle(loss, given, torch.ones(()), **options)
    target = given["target"]
    if isinstance(target, TopK):
        values = target.values.double().exp() if form == "log_probs" else target.values.double()
        target = torch.zeros(2, 12, VOCAB).double().scatter_add_(-1, target.indices, values)
    value = F.cross_entropy(z, target.flatten(0, 1), options["class_weight"], label_smoothing=0.1)
    grads = torch.autograd.grad(value, list(leaves.values()))
    for x, y in zip((value.detach(), *grads), right, strict=True):
        torch.testing.assert_close(x, torch.from_numpy(y), rtol=1e-6, atol=1e-9)


@by_op
@by_form
def test_the_smallest_scratch_is_enough(loss, form):
    """Several chunks of tokens, the last ragged, of strided labels."""
    given = problem(loss, form, (10, 15), vocab=1200)
    if form == "dense":
        wide = torch.rand(11, 15, 1210)
        given["target"] = wide[1:, :, 10:].transpose(0, 1).contiguous().transpose(0, 1)
    options = {"softcap": 5.0, "label_smoothing": 0.1, "class_weight": class_weights(1200)}
    least = _least(loss, given, options)
    assert_right(loss, given, scale=4, scratch_bytes=least, **options)


def _least(loss, given, options):
    with pytest.raises(ValueError, match=f"^{loss.op.__name__}: scratch_bytes=1 is too small") as caught:
        loss.op(**given, **options, scratch_bytes=1)
    return int(re.search(r"needs? (\d+) bytes", str(caught.value))[1])


@by_op
@by_form
def test_a_certain_label_is_that_of_its_id(loss, form):
    """With all digits of a small loss, and exact zeros of one class."""
    for vocab in (VOCAB, 1):
        given = loss.problem((6,), vocab=vocab)
        y = given["target"]
        with torch.no_grad():
            if loss.linear:
                given["bias"][:] = 0
                given["hidden"] += 1.5 * given["weight"][y]
            else:
                given["logits"].scatter_add_(1, y[:, None], torch.full((6, 1), 16.0))
        soft = {"dense": F.one_hot(y, vocab).float(), "probs": TopK(y[:, None], torch.ones(6, 1), "probs", "truncated"),
                "log_probs": TopK(y[:, None], torch.zeros(6, 1), "log_probs", "truncated")}[form]  # fmt: skip
        made, expected = ([x := loss.op(**given | {"target": t}, reduction="none"),
                           *torch.autograd.grad(x.sum(), [v for v in given.values() if v.requires_grad])]
                          for t in (soft, y))  # fmt: skip
        for a, b in zip(made, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=3e-5, atol=0)


@by_op
def test_special_statistics(loss):
    """Of a vocabulary with an entry of -inf, and of a token without any probability."""
    given = problem(loss, "dense")
    with torch.no_grad():
        given["bias" if loss.linear else "logits"][..., 5] = -math.inf
    given["target"][..., 5] = 0
    given["target"][0, 2] = 0
    _, stats = loss.op(**given, return_stats=True)
    assert all(x.isfinite().all() for x in stats)
    assert stats.log_prob[0, 2] == stats.target_logit[0, 2] == 0


@by_op
def test_special_values(loss):
    """What has no probability costs nothing though its logit is -inf; what has some costs infinity; none costs 0."""
    for form in FORMS[::2]:
        given = problem(loss, form)
        with torch.no_grad():
            given["bias" if loss.linear else "logits"][..., 5] = -math.inf
        target = given["target"]
        if form == "dense":
            target[..., 5] = 0
            target[0, 1, 5] = 0.5
            target[0, 2] = 0
        else:
            target.indices.masked_fill_(target.indices == 5, 6)
            target.indices[..., 1] = 5
            target.values[..., 1] = 0
            target.values[0, 1, 1] = 0.5
            target.values[0, 2] = 0
        made = loss.op(**given, reduction="none")
        assert made.isinf().nonzero().tolist() == [[0, 1]]
        assert made[0, 2] == 0
        (g,) = torch.autograd.grad(made.sum(), given["hidden" if loss.linear else "logits"])
        assert g.isfinite().all()
        assert not g[0, 2].any()
        weighed = loss.op(
            **given, reduction="none", label_smoothing=0.1, class_weight=(torch.arange(VOCAB) != 5).float()
        )
        assert weighed.isfinite().all()


@by_form
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shifted_certain_labels_are_shifted_ids(form, reduction):
    """The last position costs nothing, whatever its hidden state; weights go with the labels, temperatures with the
    positions."""
    given = LCE.problem((2, 12))
    with torch.no_grad():
        given["hidden"][:, -1] = math.nan
    y, leaves = given["target"], [x for x in given.values() if x.requires_grad]
    dense, ones = F.one_hot(y, VOCAB).float(), torch.ones(2, 12, 1)
    soft = dense if form == "dense" else TopK(y[..., None], ones if form == "probs" else 0 * ones, form, "truncated")
    options = {name: x for name, x in everything(reduction).items() if name not in ("class_weight", "normalizer")}
    for more in ({}, options):
        (a, *as_), (b, *bs) = (
            [x := linear_cross_entropy(**given | {"target": t}, shift=True, reduction=reduction, **more),
             *torch.autograd.grad(x.sum(), leaves)] for t in (soft, y)
        )  # fmt: skip
        torch.testing.assert_close([a, *as_], [b, *bs], rtol=3e-5, atol=1e-6)
        assert not as_[0][:, -1].any()
    single = given | {"hidden": given["hidden"][:, :1], "target": dense[:, :1]}
    assert not linear_cross_entropy(**single, shift=True, reduction=reduction).any()
    nothing = given | {"hidden": given["hidden"][:, :0], "target": dense[:, :0]}
    assert linear_cross_entropy(**nothing, shift=True, reduction="none").shape == (2, 0)


@pytest.mark.parametrize("form", ["probs", "dense"])
def test_modules_and_weight_grad_out(form):
    given = problem(CE, form)
    assert torch.equal(CrossEntropyLoss(label_smoothing=0.1)(**given), cross_entropy(**given, label_smoothing=0.1))
    given, out = problem(LCE, form), torch.zeros(VOCAB, 16)
    (expected,) = torch.autograd.grad(linear_cross_entropy(**given), given["weight"])
    for _ in range(2):
        linear_cross_entropy(**given, weight_grad_out=out).backward()
    assert given["weight"].grad is None
    torch.testing.assert_close(out, 2 * expected)
