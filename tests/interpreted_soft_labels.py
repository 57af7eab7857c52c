"""Soft labels in the Triton kernels under Triton's interpreter: checks that interpreted_losses.py runs with its own."""

from contextlib import nullcontext
from unittest import mock

import torch

from interpreter import registering
from loss_checks import RIGHT
from losses import CE, LCE, VOCAB, assert_near, mixed_plan, plan_in_forward, small_tiles
from onchip.torch import TopK, cross_entropy, linear_cross_entropy
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton import planner as triton_planner
from onchip.vocab.triton import records
from soft_labels import assert_right, class_weights, everything, problem, right_stats

CHECKS = {}
# Between what is quick: other sizes, or fewer options.
SLOW = {
    "soft_labels-plain", "soft_labels-one id", "soft_labels-without smoothing", "soft_labels-smoothed",
    "soft_labels_of_logits-plain", "soft_labels_of_ids_of_logits-plain", "soft_labels_of_every_entry-plain",
    "soft_labels_of_every_entry-bias alone", "soft_labels_as_operators-compiled", "soft_labels_as_operators-any size",
}  # fmt: skip
check = registering(CHECKS)


@check("plain", "everything", "one id", "mixed", "statistics", "smoothed", "smoothed in forward", "without smoothing")
def soft_labels(how):
    """Probabilities of K ids."""
    shape, vocab = ((300,), 300) if how == "mixed" else ((2, 12), 300 if how.startswith("smoothed") else VOCAB)
    given = problem(LCE, "probs", shape, vocab=vocab, dtype=torch.float16)
    if how == "one id":
        target = given["target"]
        given["target"] = target._replace(indices=target.indices[..., :1], values=target.values[..., :1])
    options = {} if how == "plain" else {"label_smoothing": 0.1}
    if how in ("everything", "without smoothing"):
        options = everything("none") | {"reduction": "none"}
        options |= {"label_smoothing": 0.0} if how == "without smoothing" else {}
    bound = RIGHT[torch.float16]
    if how == "smoothed in forward":
        given["weight"], given["bias"] = given["weight"].detach(), given["bias"].detach()
        with plan_in_forward():
            assert_right(LCE, given, scale=2, bound=bound, backend="triton", **options)
        return
    if how == "statistics":
        _, stats = linear_cross_entropy(**given, backend="triton", return_stats=True, softcap=5.0)
        for name, x in right_stats(LCE, given, softcap=5.0).items():
            torch.testing.assert_close(getattr(stats, name), x.detach(), rtol=2e-5, atol=2e-5, check_dtype=False)
        assert_right(LCE, given, scale=2, bound=bound, backend="triton", softcap=5.0)
        return
    with mixed_plan() if how == "mixed" else nullcontext():
        assert_right(LCE, given, scale=2, bound=bound, backend="triton", **options)


def right_soft_stats(loss, given):
    """With all options, in small tiles; of logits the first of the largest ones, and of labels, is the one.

    Entries of -inf without a label are nothing, and so is a token without labels.
    """
    target, options = given["target"], everything("none") | {"reduction": "none"}
    leaf = given["bias" if loss.linear else "logits"]
    shape = given["hidden" if loss.linear else "logits"].shape[:-1]
    each = torch.linspace(0.5, 1.5, shape.numel()).view(shape)
    options |= {
        "temperature": each,
        "token_weight": each,
        "class_weight": class_weights(leaf.shape[-1]),
        "softcap": None,
    }
    with torch.no_grad():
        if loss.linear:
            leaf[5] = -torch.inf
            given["hidden"][0, 3] = 0
        else:
            leaf[0, 3] = 0
            leaf[0, 4, 600:] = leaf[0, 4].max()
            leaf[1, :, 5] = -torch.inf
        if isinstance(target, TopK):
            target.values[1, 6, 0] = 0
            target.indices[1, 6, 0] = given["logits"][1, 6].argmax()
            target.indices.masked_fill_(target.indices == 5, 6)
        else:
            target[..., 5] = 0
            target[0, 2] = 0
            target[0, 4] = target[0, 5].mean()
    with small_tiles():
        made, stats = loss.op(**given, **options, backend="triton", return_stats=True)
        torch.testing.assert_close(made, loss.op(**given, **options, backend="triton"), rtol=1e-6, atol=1e-6)
    for name, x in right_stats(loss, given, **options).items():
        torch.testing.assert_close(getattr(stats, name), x.detach(), rtol=2e-5, atol=2e-5, check_dtype=False, msg=name)


@check("plain", "everything", "certain", "bias alone", "forward", "statistics")
def soft_labels_of_every_entry(how):
    """In float16, over several tiles of the vocabulary and chunks of it, and of a whole tile of tokens and a part."""
    given = problem(LCE, "dense", (3, 70), vocab=600, dtype=torch.float16)
    plan = triton_memory.TritonPlan(210, 512, 256, halves=how == "plain")
    options = {}
    if how == "everything":
        options = everything("none", vocab=600) | {"reduction": "none"}
        each = torch.linspace(0.5, 1.5, 210).view(3, 70)
        options |= {"temperature": each, "token_weight": each.flip(0)}
        given["target"] = torch.nn.functional.pad(given["target"], (0, 3, 1, 0))[:, 1:, :-3].float()
    if how == "certain":
        y = given["target"].argmax(-1)
        given["target"] = torch.nn.functional.one_hot(y, 600).half()
        with torch.no_grad():
            given["hidden"] += 1.5 * given["weight"][y]
    if how in ("bias alone", "forward"):
        given = {name: x.detach() for name, x in given.items()}
        given["bias"].requires_grad_(how == "bias alone")
        plan = plan if how == "bias alone" else triton_memory.TritonPlan(128)
    bound = RIGHT[torch.float16]
    with mock.patch.object(triton_planner, "plan", return_value=plan):
        if how == "statistics":
            right_soft_stats(LCE, given)
            return
        if how == "forward":
            made = linear_cross_entropy(**given, backend="triton")
            assert_near("loss", made, linear_cross_entropy(**given, backend="plain"), 2)
            return
        assert_right(LCE, given, scale=2, bound=bound, backend="triton", **options)


@check("everything", "statistics")
def soft_labels_by_few_addresses(how):
    """As where the compiler keeps too little in registers."""
    with mock.patch.object(records.Launch, "spills", return_value=True):
        soft_labels_of_every_entry(how)


@check("plain", "everything", "small tiles", "certain", "statistics")
def soft_labels_of_logits(how):
    """A probability for every entry: of labels [..., 1:, :] in a wider tensor, and of one id, with all its digits."""
    options = everything("none") | {"reduction": "none"} if how == "everything" else {}
    given = problem(CE, "dense", (2, 12), vocab=1000 if how in ("small tiles", "statistics") else VOCAB)
    if how == "statistics":
        right_soft_stats(CE, given)
        return
    if how == "everything":
        given["target"] = torch.nn.functional.pad(given["target"], (0, 3, 1, 0))[:, 1:, :-3].half()
    if how == "certain":
        y = given["target"].argmax(-1, keepdim=True)
        given["target"] = torch.zeros_like(given["target"]).scatter_(-1, y, 1.0)
        with torch.no_grad():
            given["logits"].scatter_add_(-1, y, torch.full(y.shape, 16.0))
        hard = cross_entropy(given["logits"], y[..., 0], backend="plain")
        soft = cross_entropy(**given, backend="triton")
        grads = [torch.autograd.grad(x, given["logits"])[0] for x in (soft, hard)]
        torch.testing.assert_close([soft, grads[0]], [hard, grads[1]], rtol=3e-5, atol=0)
        return
    with small_tiles() if how == "small tiles" else nullcontext():
        assert_right(CE, given, scale=2, backend="triton", **options)


@check("plain", "everything", "small tiles", "statistics", "certain")
def soft_labels_of_ids_of_logits(how):
    """Probabilities of K ids; in float16 and of strided rows too; and of one id, with all its digits."""
    options = everything("none") if how in ("everything", "statistics") else {"label_smoothing": 0.1}
    given = problem(CE, "log_probs", (2, 12), vocab=1000 if how == "small tiles" else VOCAB)
    if how == "statistics":
        right_soft_stats(CE, given)
        return
    if how == "certain":
        y = given["target"].indices[..., :1]
        given["target"] = TopK(y, torch.zeros(y.shape), "log_probs", "truncated")
        with torch.no_grad():
            given["logits"].scatter_add_(-1, y, torch.full(y.shape, 16.0))
        soft = cross_entropy(**given, backend="triton")
        hard = cross_entropy(given["logits"], y[..., 0], backend="plain")
        grads = [torch.autograd.grad(x, given["logits"])[0] for x in (soft, hard)]
        torch.testing.assert_close([soft, grads[0]], [hard, grads[1]], rtol=3e-5, atol=0)
        return
    with small_tiles() if how == "small tiles" else nullcontext():
        assert_right(CE, given, scale=2, backend="triton", reduction="none", **options)
    if how == "everything":
        given = problem(CE, "probs", dtype=torch.float16)
        given["logits"] = torch.nn.functional.pad(given["logits"].detach(), (0, 3, 1, 0))[:, 1:, :-3].requires_grad_()
        assert_right(CE, given, scale=2, bound=RIGHT[torch.float16], backend="triton", reduction="none", **options)


@check("retained", "compiled", "any size")
def soft_labels_as_operators(how):
    """A retained graph, a compiled one, and no tokens, one class, or more than a tile of each."""
    for loss, form, dtype in (
        (CE, "dense", torch.float32), (CE, "probs", torch.float32), (LCE, "dense", torch.float16),
    ):  # fmt: skip
        sizes = [((0,), 300), ((2, 0), 300), ((3,), 1), ((130,), 257)] if how == "any size" else [((2, 12), 300)]
        for shape, vocab in sizes:
            given = problem(loss, form, shape, vocab=vocab, dtype=dtype)
            leaves = [x for name, x in given.items() if name != "target" and x.requires_grad]

            def step(given, loss=loss):
                return loss.op(**given, backend="triton", label_smoothing=0.1)

            made = step(given)
            first = torch.autograd.grad(made, leaves, retain_graph=how == "retained")
            if how == "any size":
                other = loss.op(**given, backend="plain", label_smoothing=0.1)
                torch.testing.assert_close(made, other, rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(first, torch.autograd.grad(other, leaves), rtol=1e-2, atol=1e-3)
                continue
            if how == "compiled":
                torch._dynamo.reset()
                made = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)(given)
            assert all(map(torch.equal, torch.autograd.grad(made, leaves), first))


@check("dense", "probs")
def soft_labels_of_masked_logits(form):
    """What has no probability costs nothing though its logit is -inf; what has some costs infinity."""
    given = problem(CE, form)
    with torch.no_grad():
        given["logits"][..., 5] = -torch.inf
    if form == "dense":
        given["target"][..., 5] = 0
        given["target"][0, 1, 5] = 0.5
        given["target"][0, 2] = 0
    else:
        indices, values = given["target"][:2]
        indices.masked_fill_(indices == 5, 6)
        indices[..., 1] = 5
        values[..., 1] = 0
        values[0, 1, 1] = 0.5
        values[0, 2] = 0
    made = cross_entropy(**given, reduction="none", backend="triton")
    assert made.isinf().nonzero().tolist() == [[0, 1]]
    assert made[0, 2] == 0
    (g,) = torch.autograd.grad(made.sum(), given["logits"])
    assert g.isfinite().all()
    assert not g[0, 2].any()
    weighed = {"label_smoothing": 0.1, "class_weight": (torch.arange(VOCAB) != 5).float()}
    assert cross_entropy(**given, reduction="none", backend="triton", **weighed).isfinite().all()
