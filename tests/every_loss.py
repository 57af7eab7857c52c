"""Checks that hold for every op and backend in PyTorch: test_every_loss.py runs them, the Triton backends under
Triton's interpreter in processes of their own.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from onchip.frontend import torch_prepared
from onchip.torch import (
    TopK,
    cross_entropy,
    fp8_linear,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
    quantize_activation,
    quantize_weight,
)

TOKENS, HIDDEN, VOCAB = 3, 16, 40
HEAD = {"hidden": (TOKENS, HIDDEN), "weight": (VOCAB, HIDDEN), "bias": (VOCAB,)}
LOGITS = (TOKENS, VOCAB)
LAYER = {"x": (TOKENS, HIDDEN), "weight": (VOCAB, HIDDEN), "bias": (VOCAB,)}
NONE = {"reduction": "none"}


def both(*parts):
    return {f"{who}_{part}": HEAD[part] for who in ("student", "teacher") for part in parts}


class Recorded(TorchDispatchMode):
    """The calls of this library's operators.  While it watches, fp8_linear calls its registered one."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "onchip":
            self.calls.append((func, tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)))
        return func(*args, **(kwargs or {}))


def sum_of_log_probs(target, logits=None, **given):
    """All that has a gradient, of either op."""
    op = linear_log_probs if logits is None else log_probs
    given |= {} if logits is None else {"logits": logits}
    out = op(ids=target, entropy=True, lse=True, **given)
    return out.log_prob + out.entropy + out.lse


def soft_loss(target, token_weight=None, dense=False, **given):
    """Of targets and their successors, with the probabilities 0.7 and 0.3."""
    indices = torch.stack([target, (target + 1) % VOCAB], -1)
    values = torch.tensor([0.7, 0.3], dtype=torch.float32, device=target.device).expand(indices.shape)
    labels = TopK(indices, values, "probs", "truncated")
    if dense:
        zeros = torch.zeros(*target.shape, VOCAB, dtype=torch.float32, device=target.device)
        labels = zeros.scatter(-1, indices, values)
    op = cross_entropy if "logits" in given else linear_cross_entropy
    return op(target=labels, token_weight=token_weight, **given)


def registered_fp8_linear(x, weight, bias, **options):
    # Nothing is to be recorded where torch.compile looks on: it takes the registered operator anyway.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else Recorded():
        return fp8_linear(x, weight, bias, **options)


def quantised_fp8_linear(x, weight, bias, backend):
    shared, quantized = quantize_activation(x, backend=backend), quantize_weight(weight, backend=backend)
    return fp8_linear(shared, quantized, bias, backend=backend)


LAYERS = (fp8_linear, registered_fp8_linear, quantised_fp8_linear)


@dataclass(frozen=True)
class Problem:
    """An op, the shapes of its differentiable inputs and of constants, and options."""

    op: Callable
    inputs: dict
    options: dict = field(default_factory=dict)
    constants: dict = field(default_factory=dict)
    backend: str = "plain"
    device: str = "cpu"

    def __str__(self):
        said = (str(v) if isinstance(v, str) else f"{k}={v}" for k, v in self.options.items())
        soft = ["soft"] if self.op is soft_loss else []
        return "-".join([self.name if self.op in (sum_of_log_probs, soft_loss) else self.op.__name__, *soft, *said])

    @property
    def name(self):
        """What the op calls itself."""
        if self.op is sum_of_log_probs:
            return "log_probs" if "logits" in self.inputs else "linear_log_probs"
        if self.op is soft_loss:
            return "cross_entropy" if "logits" in self.inputs else "linear_cross_entropy"
        return "fp8_linear" if self.op in LAYERS else self.op.__name__

    @property
    def inplace(self):
        return self.options.get("inplace_backward", False)

    def prepare(self, tokens=TOKENS):
        """All arguments of a call, the inputs among them as leaves that need a gradient, and what calls the op."""
        # The kernels of products take no float32, and under the interpreter FP8's no float16.
        fp8 = "precision" in self.options or self.op in LAYERS
        half = self.backend == "triton" and not (self.device == "cpu" and fp8)
        given = {
            k: torch.randn([tokens if n == TOKENS else n for n in s], device=self.device).to(
                torch.float16 if half else torch.float32
            )
            for k, s in (self.inputs | self.constants).items()
        }
        for name in self.inputs:
            given[name].requires_grad_()
        if self.op not in LAYERS:
            given["target"] = torch.randint(VOCAB, (tokens,), device=self.device)
        if self.op not in (*LAYERS, sum_of_log_probs):
            given["token_weight"] = torch.rand(tokens, device=self.device)
        if self.op in (linear_cross_entropy, cross_entropy, sum_of_log_probs, soft_loss):
            given["temperature"] = torch.rand(tokens, device=self.device) + 0.5

        def call(*inputs, **more):
            return self.call(given | dict(zip(self.inputs, inputs, strict=False)) | more)

        return given, [given[name] for name in self.inputs], call

    def call(self, given):
        # Not leaves where their gradient is to take their memory.
        own = {"logits": given["logits"] * 1} if self.inplace else {}
        backend = "dequantize" if self.op in LAYERS and self.backend == "plain" else self.backend
        return self.op(**given | own, **self.options, backend=backend)


def problems(backend, device="cpu"):
    torchs = backend == "plain"
    for strategy, reduction in product(("stash", "recompute"), ("mean", "none")):
        # With "none" PyTorch's 'stash' makes hidden's gradient alone, and FP8 none of bias.
        alone = torchs and strategy == "stash" and reduction == "none"
        inputs = {"hidden": HEAD["hidden"]} if alone else HEAD
        options = {"strategy": strategy, "reduction": reduction}
        yield Problem(linear_cross_entropy, inputs, options, {"weight": HEAD["weight"]} if alone else {})
    for reduction in ("mean", "none"):
        fp8_inputs = {k: v for k, v in HEAD.items() if k != "bias" or reduction == "mean"}
        how = {"reduction": reduction}
        yield Problem(linear_cross_entropy, fp8_inputs, how | {"precision": "fp8"})
        for inplace in (False, True):
            yield Problem(cross_entropy, {"logits": LOGITS}, how | {"inplace_backward": inplace})
        yield Problem(linear_jsd, both("hidden", "weight", "bias"), how | {"teacher_grad": True})
        yield Problem(jsd, {"student_logits": LOGITS, "teacher_logits": LOGITS}, how | {"teacher_grad": True})
    yield Problem(sum_of_log_probs, HEAD)
    yield Problem(sum_of_log_probs, {"logits": LOGITS})
    yield Problem(soft_loss, HEAD, {"reduction": "mean", "dense": False})
    if torchs:  # which alone has these
        yield Problem(soft_loss, HEAD, {"reduction": "mean", "dense": True})
        for dense in (False, True):
            yield Problem(soft_loss, {"logits": LOGITS}, {"reduction": "mean", "dense": dense})
    for layer in LAYERS:
        yield Problem(layer, LAYER)


def gradients(made, leaves, grad=None, **options):
    return torch.autograd.grad(made, leaves, torch.ones_like(made) if grad is None else grad, **options)


def assert_equal(made, expected):
    assert all(torch.equal(p, q) for p, q in zip(made, expected, strict=True))


# ---------------------------------------------------------------------------------------------------------- of every op


def differentiated_twice(problem):
    """The gradient by each input, differentiated by each input and the upstream gradient, with the loss and alone."""
    _, leaves, call = problem.prepare()
    made = call()
    upstream = torch.rand_like(made, requires_grad=True)
    loss = (made * upstream).sum()
    kept = not problem.inplace
    # Where the graph is used up, PyTorch may come to the loss's part of it first, and says so.
    refused = f"{problem.name}: a backward of the backward is not supported"
    said = refused if kept else f"{refused}|backward through the graph a second time"
    for x in leaves:
        (g,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=kept)
        for y in (*leaves, upstream):
            for value in (loss + g.float().square().sum(), g.sum()):
                with pytest.raises(RuntimeError, match=said):
                    torch.autograd.grad(value, y, retain_graph=True)


def retained_graph(problem):
    """It gives the same gradients again, whatever a caller does with them."""
    _, leaves, call = problem.prepare()
    made = call()
    for upstream in (1.0, 0.3):
        grad = torch.full_like(made, upstream)
        first = gradients(made, leaves, grad, retain_graph=True)
        kept = [g.clone() for g in first]
        for g in first:
            g.mul_(3)
        assert_equal(gradients(made, leaves, grad, retain_graph=True), kept)
    assert_equal(gradients(made, leaves, grad), kept)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(made, leaves, grad)


def inputs_left_alone(problem):
    """And the same bits come of them again, also of what is computed again for backward or kept elsewhere."""
    given, leaves, call = problem.prepare()
    before = [(x.detach().clone(), x._version) for x in given.values()]
    made = call()
    expected = [made, *gradients(made, leaves)]
    hooks = [torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)]
    interpreted = problem.backend == "triton" and problem.device == "cpu"  # where a call takes seconds
    for around in hooks[: 1 if interpreted else 2]:
        with around:
            made = call()
        assert_equal([made, *gradients(made, leaves)], expected)
    for reentrant in (False, True)[: 1 if interpreted else 2]:
        made = checkpoint(call, *leaves, use_reentrant=reentrant)
        made.sum().backward()
        assert_equal([made, *(x.grad for x in leaves)], expected)
        for x in leaves:
            x.grad = None
    assert all(torch.equal(x, old) and x._version == version
               for x, (old, version) in zip(given.values(), before, strict=True))  # fmt: skip
    with torch.inference_mode():
        assert_equal([call()], expected[:1])


class Interrupted(TorchDispatchMode):
    """Raises in the place of an operator; None: counts them."""

    def __init__(self, at=None):
        super().__init__()
        self.at, self.seen = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def refused_after_failures(op, forward, backward, *, places=6, kept=(False, True)):
    """How often a second backward raises after one that failed somewhere; where it doesn't it is right.

    `backward(forward(), mode, retain_graph=...)` gives what it made.
    """
    counted, refused, nothing = Interrupted(), 0, contextlib.nullcontext()
    expected = [x.clone() for x in backward(forward(), counted)]
    for at in range(1, counted.seen + 1, max(1, counted.seen // places)):
        for retain_graph in kept:
            made, said = forward(), ""
            with pytest.raises(KeyboardInterrupt):
                backward(made, Interrupted(at), retain_graph=retain_graph)
            try:
                assert_equal(backward(made, nothing), expected)
            except RuntimeError as error:
                said = str(error)
            if said and "second time" not in said:  # PyTorch's, where only what comes later had failed
                assert f"{op}: an earlier backward was interrupted" in said
                refused += 1
    assert_equal(backward(forward(), nothing), expected)
    return refused


def interrupted(problem, *, adding=False):
    """What a backward that fails has used up isn't used again; `adding` to memory of the caller's."""
    given, leaves, call = problem.prepare()
    added = torch.zeros_like(given["weight"], dtype=torch.float32) if adding else None
    upstream = torch.full_like(call(), 0.3)

    def forward():
        torch_prepared.forget()  # each is a first call: one that repeats others has fewer operators
        return call(weight_grad_out=added.zero_()) if adding else call()

    def backward(made, mode, **options):
        with mode:
            found = gradients(made, leaves, upstream, allow_unused=adding, **options)
        return [x for x in (*found, added) if x is not None]

    interpreted = problem.backend == "triton" and problem.device == "cpu"
    few = {"places": 2, "kept": (False,)} if interpreted else {}
    refused = refused_after_failures(problem.name, forward, backward, **few)
    assert refused or not (problem.inplace or adding)


def default_dtype(problem):
    """It decides on nothing."""
    _, leaves, call = problem.prepare()
    expected, before = None, torch.get_default_dtype()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for _ in range(4 if problem.device == "cuda" else 1):
                loss = call()
                made = [loss, *gradients(loss, leaves)]
                expected = expected or made
                assert [x.dtype for x in made] == [x.dtype for x in expected]
                assert_equal(made, expected)
        finally:
            torch.set_default_dtype(before)


def negated_upstream(problem):
    """By a view, as autograd may."""
    _, leaves, call = problem.prepare()
    made = call()
    upstream = torch.rand_like(made)
    expected = gradients(made, leaves, upstream, retain_graph=True)
    for _ in range(4 if problem.device == "cuda" else 1):
        assert_equal(gradients(call(), leaves, torch._neg_view(-upstream)), expected)


def compiled(problem):
    """Whole, and for new token counts not once more."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    first = next(iter(problem.inputs))

    def step(given):
        return problem.call(given | {first: torch.tanh(given[first])}).sum() * 3

    taken = torch.compile(step, fullgraph=True, backend=counter)
    for tokens in (5, 7, 9):
        given, leaves, _ = problem.prepare(tokens)
        if "mean" in problem.options.values():
            given["normalizer"] = tokens
        made, expected = ([loss, *gradients(loss, leaves)] for loss in (taken(given), step(given)))
        for p, q in zip(made, expected, strict=True):
            # In 16 bits where a sum is rounded differs, so an error is of the size of what is summed.
            half = {"rtol": 0, "atol": 4e-3 * float(q.detach().abs().max())}
            torch.testing.assert_close(p, q, **(half if p.dtype == torch.float16 else {}))
    # Once with these numbers and once with any; Triton's plans of products are made for each.
    assert counter.frame_count <= 2 or (problem.backend == "triton" and "hidden" in str(problem.inputs))


def schema_is_true(problem):
    """Operators change what they say they change, alias nothing, and give the shapes that they promise a compiler."""
    _, leaves, call = problem.prepare()
    check_operators(lambda: gradients(call(), leaves))


def check_operators(run):
    with Recorded() as recorded:
        run()
    assert recorded.calls
    for func, args in recorded.calls:
        check_operator(func, args)


def check_operator(func, args):
    # On the CPU PyTorch has no arithmetic on FP8 tensors, and no test of a schema without.
    fp8 = any("fp8" in str(func) or "float8" in str(getattr(x, "dtype", "")) for x in (func, *args))
    tests = ("test_faketensor",) if fp8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(func, args, test_utils=tests)


# -------------------------------------------------------------------------------------------------------- of every loss


def changed_in_place(problem):
    """The loss may be, before backward: it isn't what ties gradients to inputs."""
    _, leaves, call = problem.prepare()
    loss = call()
    loss /= 2
    torch.autograd.grad(loss, leaves)


def normalizer_of_zero(problem):
    """Without tokens to divide, the loss and its gradients are 0; else it is an error, or on the GPU not finite."""
    given, leaves, call = problem.prepare()
    ignored = torch.full_like(given["target"], -100)
    for normalizer in (torch.zeros(()), torch.zeros((), dtype=torch.int64, device=problem.device)):
        loss = call(target=ignored, normalizer=normalizer)
        assert loss == 0
        assert not any(g.any() for g in torch.autograd.grad(loss, leaves))
        if problem.device == "cpu":
            with pytest.raises(ValueError, match=r"normalizer must be finite and above 0; got 0.0"):
                call(normalizer=normalizer)
        else:
            assert not call(normalizer=normalizer).isfinite()


def ignored_tokens(problem):
    """Nothing leaks of them: a NaN or an infinity in their rows, weights and upstream gradients."""
    given, leaves, call = problem.prepare()
    for bad in (math.nan, math.inf):
        y = given["target"].clone()
        y[1] = -100
        clean = call(target=y)
        expected = [clean, *gradients(clean, leaves)]
        dirty = {k: x.detach().clone() for k, x in given.items() if x.shape[:1] == (TOKENS,) and k != "target"}
        for x in dirty.values():
            x[1] = bad
        for name in problem.inputs:
            if name in dirty:
                dirty[name].requires_grad_()
        made = call(**dirty, target=y)
        upstream = torch.ones_like(made)
        if made.ndim:
            assert made[1] == 0
            upstream[1] = bad
        now = [dirty.get(name, given[name]) for name in problem.inputs]
        made = [made, *gradients(made, now, upstream)]
        for p, q in zip(made, expected, strict=True):
            torch.testing.assert_close(p, q)
        assert not any(g[1].any() for g, name in zip(made[1:], problem.inputs, strict=True) if name in dirty)


def no_tokens(problem):
    _, leaves, call = problem.prepare(0)
    made = call()
    assert not made.any()
    assert all(g.shape == x.shape and not g.any() for g, x in zip(gradients(made, leaves), leaves, strict=True))


def checks(backend, device="cpu"):
    made = {}
    for problem in problems(backend, device):
        given = replace(problem, backend=backend, device=device)
        wanted = [differentiated_twice, interrupted, default_dtype, negated_upstream]
        if "weight" in problem.inputs and problem.op not in (sum_of_log_probs, quantised_fp8_linear):
            made[f"interrupted_while_adding-{problem}"] = partial(interrupted, given, adding=True)
        if "none" not in problem.options.values():
            wanted += [retained_graph, inputs_left_alone, schema_is_true, no_tokens]
            wanted += [] if problem.inplace else [compiled]
        if problem.op not in (*LAYERS, soft_loss):  # whose tokens all count
            wanted += [ignored_tokens]
        if "mean" in problem.options.values():
            wanted += [changed_in_place]
            wanted += [normalizer_of_zero] if problem.op is not soft_loss else []
        made |= {f"{check.__name__}-{problem}": partial(check, given) for check in wanted}
    return made


CHECKS = checks("triton")
