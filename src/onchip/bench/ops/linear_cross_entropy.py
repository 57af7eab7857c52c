"""The benchmark of linear_cross_entropy: its inputs, this op with several budgets, and its peers.

The loss is the mean over the tokens that are not ignored, without bias; of a case with reduction="none" it is each
token's, and the gradients are those of their mean.  A case's options are passed to all; a peer that lacks one is listed
with what it raises.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from onchip.bench.benchmark import Benchmark, Problem, cross_entropies, draw_linear
from onchip.bench.peers import (
    IGNORED,
    NARROW,
    Implementation,
    Refusal,
    compiled,
    gpu_only,
    imported,
    needs,
    no_compiler,
    only_narrow,
    optional,
    plain_peers,
    xla_only_narrow,
)
from onchip.bench.timing import Step
from onchip.core.backends import choose_backend
from onchip.core.sizes import MIB
from onchip.ops.linear_cross_entropy import cases
from onchip.ops.linear_cross_entropy.checks import plain_refusals
from onchip.oracle.checks import dtype_name, op_in
from onchip.vocab import memory
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.xla import memory as xla_memory

Loss = Callable[..., Any]
"""Mean cross-entropy of (hidden [T, H], weight [V, H], target [T]) over the tokens whose target is not IGNORED."""
ScratchBytes = Callable[[Any, memory.Problem], int | None]
"""The budget for a problem, by the framework's adapter; None for the op's default."""


def _make(fw: Any, case: cases.Case, device: str, dtype: str) -> Problem:
    if getattr(case, "autocast", False) and fw.NAME == "jax":
        raise NotImplementedError("JAX has no autocast")
    return Problem(case, device, draw_linear(fw, case, device, dtype), case.options)


@dataclass
class LossBenchmark(Benchmark):
    """Of losses of a linear layer, some of which run under autocast."""

    def plain_steps(self, problem: Problem, function: Loss) -> Mapping[str, Step]:
        hidden, weight, _ = problem.arrays
        if hidden.dtype != weight.dtype:
            function = self.fw.under_autocast(function, hidden.dtype)
        return super().plain_steps(problem, function)


def _returned(problem: Problem) -> tuple[str]:
    return ("losses" if problem.options.get("reduction") == "none" else "loss",)


# ----------------------------------------------------------------------------------------------------------- this op


def _sizes(fw: Any, problem: Problem, mode: str = "forward+backward") -> memory.Problem:
    """What the op's plan depends on."""
    hidden, weight, _ = problem.arrays
    backward = mode != "forward"
    return memory.Problem(
        len(hidden),
        hidden.shape[1],
        len(weight),
        dtype=dtype_name(hidden.dtype),
        weight_dtype=dtype_name(weight.dtype),
        device=problem.device,
        grad_hidden=backward,
        grad_weight=backward and not getattr(problem.case, "frozen", False),
        per_token_loss=problem.options.get("reduction") == "none",
        softcap=problem.options.get("softcap") is not None,
        smoothing=problem.options.get("label_smoothing", 0.0),
        compacted=fw.NAME == "jax",
    )


def _small(fw: Any, p: memory.Problem) -> int:
    """As the name says; in JAX, with many more tokens than H, what the kernels need for a useful chunk."""
    budget = 64 * MIB + 4 * p.tokens * p.hidden
    return budget if fw.NAME == "torch" else max(budget, mosaic_memory.useful_scratch(p, "auto"))


def _part_of_logits(n: int, fw: Any, p: memory.Problem) -> int:
    """The float32 logits' bytes / n, or what the smallest chunk needs."""
    least: int = (memory if fw.NAME == "torch" else xla_memory).scratch_at_least(_at_worst(fw, p), "recompute")
    return max(memory.logits_bytes(p) // n, least)


def _at_worst(fw: Any, p: memory.Problem) -> memory.Problem:
    """The problem as the op sees it before it has looked at the labels."""
    return replace(p, compacted=fw.NAME == "jax" or p.device == "cpu")


def _own(
    fw: Any,
    name: str,
    budget: ScratchBytes = lambda fw, p: None,
    not_on_cpu: str | None = None,
    **options: Any,
) -> Implementation:
    """This package's op with one budget and, in PyTorch, a strategy, in JAX a backend."""

    def unavailable(device: str, dtype: str) -> str | None:
        if device == "cpu":
            return not_on_cpu
        return plain_refusals(device, dtype, fw.NAME)[options["backend"]] if "backend" in options else None

    def record(problem: Problem, mode: str) -> dict[str, Any]:
        return _plan(fw, _sizes(fw, problem, mode), budget(fw, _sizes(fw, problem)), **options)

    def steps(problem: Problem, op: Loss) -> Mapping[str, Step]:
        benchmark = TORCH if fw.NAME == "torch" else JAX
        return benchmark.plain_steps(problem, partial(op, **options, scratch_bytes=budget(fw, _sizes(fw, problem))))

    load = partial(op_in, fw, "linear_cross_entropy")
    return Implementation(name, load, unavailable, package="onchip", steps=steps, record=record)


def _plan(
    fw: Any, p: memory.Problem, scratch: int | None, strategy: str = "auto", backend: str = "auto"
) -> dict[str, Any]:
    """The backend that takes the problem, and how it cuts it."""
    refusals = plain_refusals(p.device, p.dtype, fw.NAME, vars(p))
    plan: Any
    if fw.NAME == "jax":
        backend = choose_backend("linear_cross_entropy", backend, refusals)
        plan = op_in(fw, "linear_cross_entropy", "MODULES")[backend].plan(p, strategy, scratch)
    elif refusals["triton"] is None:
        backend, plan = "triton", triton_memory.plan(p, strategy, scratch)
    else:
        strategy = memory.choose_strategy(_at_worst(fw, p), strategy, scratch)
        backend, plan = "torch", memory.plan(p, strategy, scratch)
    return {"backend": backend, "scratch_bytes": scratch, **vars(plan)}


# Of precision='fp8', an approximation: the loss, and 25 dB of each gradient.
FP8_BOUNDS = {"loss": 1e-3, "grad_hidden": 10 ** (-25 / 20), "grad_weight": 10 ** (-25 / 20)}
_FP8 = {"precision": "fp8", "backend": "triton"}


def _in_fp8(fw: Any, name: str, before: bool) -> Implementation:
    """`before`: the weight is quantised before the timed steps, as for the later micro-batches of a step."""

    def unavailable(device: str, dtype: str) -> str | None:
        import torch

        from onchip.ops.linear_cross_entropy import fp8_op

        return fp8_op.refusals(torch.device(device))["triton"]

    def record(problem: Problem, mode: str) -> dict[str, Any]:
        chunk = fp8_memory.plan(_sizes(fw, problem), None)
        return {**_FP8, "weight_quantised_before": before, "chunk": chunk}

    load = partial(partial, op_in(fw, "linear_cross_entropy"), **_FP8)
    steps = _quantized_before_steps if before else None
    return Implementation(name, load, unavailable, {}, "onchip", steps, record, FP8_BOUNDS)


def _quantized_before_steps(problem: Problem, op: Loss) -> Mapping[str, Step]:
    from onchip.ops.fp8_linear.torch_op import quantize_weight

    copies = quantize_weight(problem.arrays[1])

    def of_copies(hidden: Any, weight: Any, target: Any, **options: Any) -> Any:
        return op(hidden, copies._replace(weight=weight), target, **options)

    return TORCH.plain_steps(problem, of_copies)


def plain(fw: Any, wide: bool = False, **losses: Any) -> Loss:
    """The plain expression: logits in float32 if `wide`, else in hidden's dtype."""
    return lambda hidden, weight, target, **options: fw.cross_entropy(
        fw.logits(hidden, weight, wide), target, **losses, **options
    )


# ------------------------------------------------------------------------------------------------- peers in PyTorch


def _linear_cross_entropy(options: str | None) -> Loss:
    """PyTorch's own, with its default options in chunks if `options` is given."""
    from torch import nn

    function = nn.functional.linear_cross_entropy
    return partial(function, options=nn.LinearCrossEntropyOptions()) if options else function


def _older_torch(device: str, dtype: str) -> str | None:
    import torch

    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        return None
    return f"torch.nn.functional.linear_cross_entropy came with torch 2.13; this is {torch.__version__}"


def _liger(accum_dtype: str | None) -> Loss:
    import torch
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    dtype = getattr(torch, accum_dtype) if accum_dtype else None

    @cache
    def made(z_loss: float = 0.0, **options: Any) -> Any:
        return LigerFusedLinearCrossEntropyLoss(accum_dtype=dtype, lse_square_scale=z_loss, **options)

    return lambda hidden, weight, target, **options: made(**options)(weight, hidden, target)


_LIGER_SM90 = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"


def _liger_for_hopper(stores_logits: bool) -> Loss:
    if stores_logits:
        return imported(f"{_LIGER_SM90}:LigerFusedLinearCrossEntropySM90Function.apply")
    scaled = imported("liger_kernel.ops:LigerFusedLinearScaledCrossEntropyFunction.apply")

    def loss(hidden: Any, weight: Any, target: Any, reduction: str = "mean") -> Any:
        each = scaled(hidden, weight, target)
        return each if reduction == "none" else each.sum() / (target != IGNORED).sum()

    return loss


def _hopper_only(package: str) -> Refusal:
    def refusal(device: str, dtype: str) -> str | None:
        if reason := gpu_only(package, ("bfloat16",))(device, dtype):
            return reason
        import torch

        found = torch.cuda.get_device_capability()
        return None if found == (9, 0) else f"it is for compute capability 9.0; this device has {found[0]}.{found[1]}"

    return refusal


def _torch_implementations(fw: Any) -> Sequence[Implementation]:
    own = partial(_own, fw)
    liger, cce, quack = "liger-kernel", "cut-cross-entropy", "quack-kernels"
    load_cce = partial(imported, "cut_cross_entropy:linear_cross_entropy")
    load_quack = partial(imported, "quack.linear_cross_entropy:chunked_linear_cross_entropy")
    return (
        own("onchip auto"),
        own("onchip, 64 MiB + 4TH", _small, "a budget for GPUs"),
        own("onchip, an eighth of the logits", partial(_part_of_logits, 8), "a budget for GPUs"),
        own("onchip, no bound", lambda fw, p: 1 << 60, "a budget for GPUs"),
        own("onchip stash", strategy="stash"),
        own("onchip recompute", partial(_part_of_logits, 16), strategy="recompute"),
        _in_fp8(fw, "onchip fp8, approximate", before=False),
        _in_fp8(fw, "onchip fp8, approximate, weight quantised before", before=True),
        Implementation("torch eager", lambda: plain(fw)),
        Implementation("torch eager, float32 logits", lambda: plain(fw, wide=True), only_narrow),
        Implementation("torch.compile", lambda: compiled(plain(fw)), no_compiler),
        optional("F.linear_cross_entropy", "torch", _linear_cross_entropy, _older_torch, options=None),
        optional(
            "F.linear_cross_entropy chunked",
            "torch",
            _linear_cross_entropy,
            _older_torch,
            options="LinearCrossEntropyOptions()",
        ),
        optional("liger", liger, _liger, gpu_only(liger, ("float32", *NARROW)), accum_dtype=None),
        optional("liger, float32 sums", liger, _liger, gpu_only(liger, NARROW), accum_dtype="float32"),
        optional("liger for Hopper", liger, _liger_for_hopper, _hopper_only(liger), stores_logits=True),
        optional("liger for Hopper, scaled", liger, _liger_for_hopper, _hopper_only(liger), stores_logits=False),
        optional("cut-cross-entropy", cce, load_cce, gpu_only(cce, NARROW), filter_eps="high"),
        optional("cut-cross-entropy, no filter", cce, load_cce, gpu_only(cce, NARROW), filter_eps=None),
        optional("quack base", quack, load_quack, gpu_only(quack, NARROW), chunk_size=4096, use_scaled_exp=False),
        optional("quack scaled-exp", quack, load_quack, _hopper_only(quack), chunk_size=4096, use_scaled_exp=True),
    )


# ------------------------------------------------------------------------------------------------------ peers in JAX


def _tokamax(implementation: str) -> Loss:
    from tokamax import linear_softmax_cross_entropy_loss

    return lambda hidden, weight, labels: linear_softmax_cross_entropy_loss(
        hidden, labels, weight, reduction="mean", implementation=implementation
    )


def _of_counted_tokens(problem: Problem, loss: Loss, *, turned: bool = False) -> Mapping[str, Step]:
    """Steps of a function that knows no ignored tokens and, if `turned`, takes the weight as [H, V]."""
    hidden, weight, labels = problem.arrays
    if bool((labels == IGNORED).any()):
        raise NotImplementedError("it has no ignore_index")
    return JAX.plain_steps(replace(problem, arrays=(hidden, weight.T if turned else weight, labels)), loss)


def _jax_implementations(fw: Any) -> Sequence[Implementation]:
    own = partial(_own, fw)
    one_hot, optax = partial(plain, fw, losses=fw.one_hot), partial(plain, fw, losses=fw.by_optax)
    no_tokamax, turned = needs("tokamax"), partial(_of_counted_tokens, turned=True)
    load_cce = partial(imported, "jax_cce:linear_cross_entropy")
    return (
        own("onchip auto"),
        own("onchip, 64 MiB + 4TH", _small, "a budget for GPUs"),
        own("onchip, an eighth of the logits", partial(_part_of_logits, 8)),
        own("onchip, no bound", lambda fw, p: 1 << 60, "a budget for GPUs"),
        own("onchip triton", not_on_cpu="it runs on GPUs", backend="triton"),
        own("onchip xla", not_on_cpu="on the CPU it is the same as onchip auto", backend="xla"),
        *plain_peers("jax", partial(plain, fw)),
        Implementation("XLA, 16-bit logits, gathered", lambda: fw.narrow, xla_only_narrow, package="jax"),
        Implementation("XLA, 16-bit logits, one-hot", one_hot, xla_only_narrow, {"one_hot": True}, "jax"),
        Implementation("optax, float32 logits", partial(optax, wide=True), needs("optax"), package="optax"),
        optional("tokamax xla", "tokamax", _tokamax, no_tokamax, turned, implementation="xla"),
        optional("tokamax chunked_xla", "tokamax", _tokamax, no_tokamax, turned, implementation="chunked_xla"),
        optional("jax-cce", "jax-cce", load_cce, needs("jax-cce"), _of_counted_tokens, chunk_size=4096),
    )


TORCH, JAX = (
    LossBenchmark(framework, cases.SUITES, implementations, _make, cross_entropies, forward=_returned)
    for framework, implementations in (("torch", _torch_implementations), ("jax", _jax_implementations))
)
