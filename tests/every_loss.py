"""What holds for every loss and backend in PyTorch: what test_every_loss.py runs, the Triton backends under Triton's
interpreter in processes of their own."""

import sys
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

from interpreter import main
from onchip.ops.linear_cross_entropy import fp8_op
from onchip.torch import cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs

TOKENS, HIDDEN, VOCAB = 3, 16, 40
HEAD = {"hidden": (TOKENS, HIDDEN), "weight": (VOCAB, HIDDEN), "bias": (VOCAB,)}
LOGITS = (TOKENS, VOCAB)


def both(*parts):
    return {f"{who}_{part}": HEAD[part] for who in ("student", "teacher") for part in parts}


def log_probs(hidden, weight, bias, target, **options):
    out = linear_log_probs(hidden, weight, target, bias, entropy=True, lse=True, **options)
    return out.log_prob + out.entropy + out.lse


def cases(backend):
    """Ops, shapes of their differentiable inputs and of constants, and options."""
    reductions = [{"reduction": r} for r in ("mean", "none")]
    head_strategies = [{"strategy": s} for s in ("stash", "recompute")]
    for strategy, reduction in product(head_strategies, reductions):
        # With "none" PyTorch's 'stash' makes hidden's gradient alone, and FP8 none of bias.
        alone = backend == "torch" and strategy["strategy"] == "stash" and reduction["reduction"] == "none"
        inputs = {"hidden": HEAD["hidden"]} if alone else HEAD
        yield linear_cross_entropy, inputs, {"weight": HEAD["weight"]} if alone else {}, strategy | reduction
    for reduction in reductions:
        fp8_inputs = {k: v for k, v in HEAD.items() if k != "bias" or reduction["reduction"] == "mean"}
        yield linear_cross_entropy, fp8_inputs, {}, reduction | {"precision": "fp8"}
        for inplace in (False, True):
            yield cross_entropy, {"logits": LOGITS}, {}, reduction | {"inplace_backward": inplace}
        yield linear_jsd, both("hidden", "weight", "bias"), {}, reduction | {"teacher_grad": True}
        yield jsd, {"student_logits": LOGITS, "teacher_logits": LOGITS}, {}, reduction | {"teacher_grad": True}
    yield log_probs, HEAD, {}, {}


def prepare(op, inputs, constants, options, backend, device):
    """All arguments of a call, the inputs among them as leaves that need a gradient, and what calls the op."""
    # The kernels of products take no float32, and under the interpreter FP8's no float16.
    dtype = torch.float32 if backend == "torch" or (device == "cpu" and "precision" in options) else torch.float16
    given = {k: torch.randn(s, device=device, dtype=dtype) for k, s in (inputs | constants).items()}
    for name in inputs:
        given[name].requires_grad_()
    given["target"] = torch.randint(VOCAB, (TOKENS,), device=device)

    def call(**more):
        # Not leaves where their gradient is to take their memory.
        own = {"logits": given["logits"] * 1} if options.get("inplace_backward") else {}
        return op(**given | own | more, **options, backend=backend)

    return given, [given[name] for name in inputs], call


def differentiated_twice(op, inputs, constants, options, backend, device="cpu"):
    """The gradient by each input, differentiated by each input and the upstream gradient, with the loss and alone."""
    _, leaves, call = prepare(op, inputs, constants, options, backend, device)
    made = call()
    upstream = torch.rand_like(made, requires_grad=True)
    loss = (made * upstream).sum()
    kept = not options.get("inplace_backward")
    # Where the graph is used up, PyTorch may come to the loss's part of it first, and says so.
    said = "a backward of the backward is not supported" + ("" if kept else "|backward through the graph a second time")
    for x in leaves:
        (g,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=kept)
        for y in (*leaves, upstream):
            for value in (loss + g.float().square().sum(), g.sum()):
                with pytest.raises(RuntimeError, match=said):
                    torch.autograd.grad(value, y, retain_graph=True)


def changed_in_place(op, inputs, constants, options, backend, device="cpu"):
    """The loss may be, before backward: it isn't what ties gradients to inputs."""
    _, leaves, call = prepare(op, inputs, constants, options, backend, device)
    loss = call()
    loss /= 2
    torch.autograd.grad(loss, leaves)


def normalizer_of_zero(op, inputs, constants, options, backend, device="cpu"):
    """Without tokens to divide, the loss and its gradients are 0; else it is an error, or on the GPU not finite."""
    given, leaves, call = prepare(op, inputs, constants, options, backend, device)
    ignored = torch.full_like(given["target"], -100)
    for normalizer in (torch.zeros(()), torch.zeros((), dtype=torch.int64, device=device)):
        loss = call(target=ignored, normalizer=normalizer, token_weight=torch.rand(TOKENS, device=device))
        assert loss == 0
        assert not any(g.any() for g in torch.autograd.grad(loss, leaves))
        if device == "cpu":
            with pytest.raises(ValueError, match=r"normalizer must be finite and above 0; got 0.0"):
                call(normalizer=normalizer)
        else:
            assert not call(normalizer=normalizer).isfinite()


def checks(backend, device="cpu"):
    def name(op, options):
        return "-".join([op.__name__, *(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in options.items())])

    return {
        f"{check.__name__}-{name(op, options)}": partial(check, op, inputs, constants, options, backend, device)
        for check in (differentiated_twice, changed_in_place, normalizer_of_zero)
        for op, inputs, constants, options in cases(backend)
        if check is differentiated_twice or options.get("reduction") == "mean"
    }


CHECKS = checks("triton")

if __name__ == "__main__":
    from fp8_linear import fp8_interpreter

    fp8_interpreter.mend()
    with (
        mock.patch.object(fp8_op, "refusals", return_value={"torch": None, "triton": None}),
        mock.patch.object(fp8_op, "LOGITS", torch.float32),
    ):
        main(CHECKS, sys.argv[1:])
