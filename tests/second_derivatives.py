"""Second derivatives of every op in PyTorch raise: what test_second_derivatives.py runs, the Triton backends under
Triton's interpreter in processes of their own."""

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
    """(op, its differentiable inputs' shapes, options) by name."""
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


def tensors(inputs, constants, dtype=torch.float32, device="cpu"):
    """All of the arguments of a call, the inputs as leaves that need a gradient."""
    made = {k: torch.randn(s, device=device, dtype=dtype) for k, s in (inputs | constants).items()}
    for name in inputs:
        made[name].requires_grad_()
    return made | {"target": torch.randint(VOCAB, (TOKENS,), device=device)}


def check(op, inputs, constants, options, backend, device="cpu"):
    """The gradient by each input, differentiated by each input and the upstream gradient, with the loss and alone."""
    # The kernels of products take no float32, and under the interpreter FP8's no float16.
    dtype = torch.float32 if backend == "torch" or (device == "cpu" and "precision" in options) else torch.float16
    given = tensors(inputs, constants, dtype, device)
    leaves = {k: given[k] for k in inputs}
    inplace = options.get("inplace_backward", False)
    made = op(**{k: x * 1 if inplace else x for k, x in given.items()}, **options, backend=backend)
    upstream = torch.rand_like(made, requires_grad=True)
    loss = (made * upstream).sum()
    for x in leaves.values():
        (g,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=not inplace)
        for y in (*leaves.values(), upstream):
            for value in (loss + g.float().square().sum(), g.sum()):
                with pytest.raises(RuntimeError, match="a backward of the backward is not supported"):
                    torch.autograd.grad(value, y, retain_graph=True)


def checks(backend, device="cpu"):
    def name(op, options):
        return "-".join([op.__name__, *(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in options.items())])

    return {name(c[0], c[3]): partial(check, *c, backend, device) for c in cases(backend)}


CHECKS = checks("triton")

if __name__ == "__main__":
    from fp8_linear import fp8_interpreter

    fp8_interpreter.mend()
    with (
        mock.patch.object(fp8_op, "refusals", return_value={"torch": None, "triton": None}),
        mock.patch.object(fp8_op, "LOGITS", torch.float32),
    ):
        main(CHECKS, sys.argv[1:])
