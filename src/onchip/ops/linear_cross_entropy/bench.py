"""The benchmark of linear_cross_entropy: its inputs, this op with several budgets, and its peers.

The loss is the mean over the tokens that are not ignored, without bias.  In a case with reduction="none" it is each
token's loss, and the gradients are those of their mean.  A case's options are passed to all implementations; one that
lacks an option is listed with the error that it raises.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from onchip.bench.benchmark import Benchmark, BenchProblem, Reference, cross_entropies, draw_linear
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
from onchip.ops.linear_cross_entropy import checks, world_peers
from onchip.ops.linear_cross_entropy.checks import plain_refusals
from onchip.oracle.cases import Case
from onchip.oracle.checks import UNIT_ROUNDOFF, dtype_name, op_in
from onchip.vocab import memory
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.triton import planner as triton_planner
from onchip.vocab.xla import memory as xla_memory

Loss = Callable[..., Any]
"""Mean cross-entropy of (hidden [T, H], weight [V, H], target [T]) over the tokens whose target is not IGNORED."""
ScratchBytes = Callable[[Any, memory.Problem], int | None]
"""The budget for a problem, by the framework's adapter; None for the op's default."""


def _make(fw: Any, case: Case, device: str, dtype: str) -> BenchProblem:
    if getattr(case, "autocast", False) and fw.NAME == "jax":
        raise NotImplementedError("JAX has no autocast")
    return BenchProblem(case, device, draw_linear(fw, case, device, dtype), case.options)


@dataclass
class LossBenchmark(Benchmark):
    """The benchmark of losses of a linear layer, some of which run under autocast."""

    def plain_steps(self, problem: BenchProblem, function: Loss) -> Mapping[str, Step]:
        hidden, weight, _ = problem.arrays
        if hidden.dtype != weight.dtype:
            function = self.fw.under_autocast(function, hidden.dtype)
        return super().plain_steps(problem, function)


def _returned(problem: BenchProblem) -> tuple[str]:
    return ("losses" if problem.options.get("reduction") == "none" else "loss",)


# ----------------------------------------------------------------------------------------------------------- this op


def _sizes(fw: Any, problem: BenchProblem, mode: str = "forward+backward") -> memory.Problem:
    """The problem, on which the op's plan depends."""
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
    """64 MiB + 4TH; in JAX, with many more tokens than H, the memory that the kernels need for a useful chunk."""
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

    def record(problem: BenchProblem, mode: str) -> dict[str, Any]:
        return _plan(fw, _sizes(fw, problem, mode), budget(fw, _sizes(fw, problem)), **options)

    def steps(problem: BenchProblem, op: Loss) -> Mapping[str, Step]:
        benchmark = TORCH if fw.NAME == "torch" else JAX
        return benchmark.plain_steps(problem, partial(op, **options, scratch_bytes=budget(fw, _sizes(fw, problem))))

    load = partial(op_in, fw, "linear_cross_entropy")
    return Implementation(name, load, unavailable, package="onchip", steps=steps, record=record)


def _plan(
    fw: Any, p: memory.Problem, scratch: int | None, strategy: str = "auto", backend: str = "auto"
) -> dict[str, Any]:
    """The backend that takes the problem, and how it cuts the problem."""
    refusals = plain_refusals(p.device, p.dtype, fw.NAME, vars(p))
    plan: Any
    if fw.NAME == "jax":
        backend = choose_backend("linear_cross_entropy", backend, refusals)
        plan = resolve_name("onchip.vocab.jax_ways:MODULES")[backend].plan(p, strategy, scratch)
    elif refusals["triton"] is None:
        backend, plan = "triton", triton_planner.plan(p, strategy, scratch)
    else:
        strategy = memory.choose_strategy(_at_worst(fw, p), strategy, scratch)
        backend, plan = "plain", memory.plan(p, strategy, scratch)
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

    def record(problem: BenchProblem, mode: str) -> dict[str, Any]:
        chunk = fp8_memory.plan(_sizes(fw, problem), None)
        return {**_FP8, "weight_quantised_before": before, "chunk": chunk}

    load = partial(partial, op_in(fw, "linear_cross_entropy"), **_FP8)
    steps = _quantized_before_steps if before else None
    return Implementation(name, load, unavailable, {}, "onchip", steps, record, FP8_BOUNDS)


def _quantized_before_steps(problem: BenchProblem, op: Loss) -> Mapping[str, Step]:
    copies = imported("onchip.torch:quantize_weight")(problem.arrays[1])

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
    """PyTorch's own linear_cross_entropy, with its default options, in chunks if `options` is given."""
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
        stored = imported(f"{_LIGER_SM90}:LigerFusedLinearCrossEntropySM90Function.apply")

        def whole(
            hidden: Any,
            weight: Any,
            target: Any,
            reduction: str = "mean",
            label_smoothing: float = 0.0,
            softcap: float | None = None,
            z_loss: float = 0.0,
        ) -> Any:
            # By position; it says itself which of these it lacks.
            return stored(hidden, weight, target, IGNORED, reduction, None, None, label_smoothing, softcap, z_loss)

        return whole
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
        Implementation(
            "quack scaled-exp",
            load_quack,
            _hopper_only(quack),
            package=quack,
            steps=_quack_steps,
            record=lambda problem, mode: _quack_scaled_exp(problem),
        ),
    )


def _quack_scaled_exp(problem: BenchProblem) -> dict[str, Any]:
    """quack's options.  It takes no chunk of exactly H tokens, where it can't tell a vector by token from one by
    column."""
    tokens, hidden = problem.arrays[0].shape

    def taken(chunk: int) -> bool:
        last = (tokens - 1) % chunk // 128 * 128 + 128  # padded to whole tiles
        return hidden not in ((last, chunk) if tokens > chunk else (last,))

    return {"chunk_size": next(filter(taken, (4096, 8192, 2048)), 4096), "use_scaled_exp": True}


def _quack_steps(problem: BenchProblem, loss: Loss) -> Mapping[str, Step]:
    return TORCH.plain_steps(problem, partial(loss, **_quack_scaled_exp(problem)))


# ---------------------------------------------------------------------------------------- a vocabulary that ranks share


def _own_part(x: Any) -> Any:
    """This rank's rows."""
    import torch.distributed as dist

    return x.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()


def _make_sharded(fw: Any, case: Case, device: str, dtype: str) -> BenchProblem:
    """All tokens, and this rank's rows of the weight; every rank draws the same whole weight."""
    whole = _make(fw, case, device, dtype)
    hidden, weight, target = whole.arrays
    return replace(whole, arrays=(hidden, fw.leaf(_own_part(weight), dtype), target))


@dataclass
class ShardedBenchmark(LossBenchmark):
    """The benchmark with a vocabulary that is sharded over the ranks of the default process group."""

    def plain_steps(self, problem: BenchProblem, function: Loss) -> Mapping[str, Step]:
        """The steps of a function of hidden [T, H], this rank's weight and target, which is also told where its rows
        begin in the vocabulary, and how large that is."""
        import torch.distributed as dist

        vocab = problem.case.vocab
        start = dist.get_rank() * -(-vocab // dist.get_world_size())
        return super().plain_steps(problem, partial(function, start=start, vocab=vocab))

    def reference(self, problem: BenchProblem) -> Reference:
        """The reference for the whole vocabulary, with this rank's rows of the weight's gradient.

        All peers add up hidden's gradient in its dtype, and so round once for each rank.
        """
        import torch.distributed as dist

        dtype = dtype_name(problem.arrays[0].dtype)
        right = TORCH.reference(TORCH.make_problem(problem.case, problem.device, dtype))
        bound = math.hypot(right.bounds["grad_hidden"], UNIT_ROUNDOFF[dtype] * dist.get_world_size() ** 0.5)
        return _with_own_part(replace(right, bounds={**right.bounds, "grad_hidden": bound}), "grad_weight")


def _with_own_part(reference: Reference, name: str) -> Reference:
    return replace(reference, values={**reference.values, name: _own_part(reference.values[name])})


def _of_whole_tokens(fw: Any, **more: Any) -> Loss:
    import torch.distributed as dist

    op = op_in(fw, "linear_cross_entropy")

    def loss(hidden: Any, weight: Any, target: Any, *, start: int, vocab: int, **options: Any) -> Any:
        return op(
            hidden, weight, target, vocab_group=dist.group.WORLD, vocab_start=start, vocab_size=vocab, **more, **options
        )  # fmt: skip

    return loss


def _sequence_steps(problem: BenchProblem, loss: Loss) -> Mapping[str, Step]:
    """Steps of a rank that has only its part of the tokens."""
    hidden, weight, target = problem.arrays
    mine = WORLD.fw.leaf(_own_part(hidden), dtype_name(hidden.dtype))
    part = replace(problem, arrays=(mine, weight, target))
    return WORLD.plain_steps(part, partial(loss, hidden_layout="sequence"))


def _check_sequence(reference: Reference, mode: str, returned: Sequence[Any]) -> Mapping[str, tuple[float, float]]:
    return WORLD.check(_with_own_part(reference, "grad_hidden"), mode, returned)


def _cce_unsharded(device: str, dtype: str) -> str | None:
    cce = "cut-cross-entropy"
    if reason := gpu_only(cce, NARROW)(device, dtype):
        return reason
    if find_spec("cut_cross_entropy.vocab_parallel") is None:
        return f"{cce} {metadata.version(cce)} has no vocab_parallel; install it from github.com/apple/ml-cross-entropy"
    return None


def _sharded_implementations(fw: Any) -> Sequence[Implementation]:
    liger, cce, peers = "liger-kernel", "cut-cross-entropy", world_peers
    cuda, any_dtype = partial(gpu_only, dtypes=NARROW), partial(gpu_only, dtypes=("float32", *NARROW))
    own = partial(Implementation, load=partial(_of_whole_tokens, fw), package="onchip")
    return (
        own("onchip auto", options={"hidden_layout": "replicated"}),
        own(
            "onchip auto, sequence layout",
            options={"hidden_layout": "sequence"},
            steps=_sequence_steps,
            check=_check_sequence,
        ),
        Implementation("onchip auto, 1 GiB", partial(_of_whole_tokens, fw, scratch_bytes="1GiB"), package="onchip"),
        Implementation(
            "onchip fp8, approximate",
            partial(_of_whole_tokens, fw, precision="fp8"),
            cuda("onchip"),
            package="onchip",
            error_bounds=FP8_BOUNDS,
        ),
        Implementation("onchip cross_entropy in place", partial(peers.of_own_logits, fw), package="onchip"),
        Implementation("torch, three all-reduces, float32 logits", peers.three_reductions),
        Implementation(
            "torch loss_parallel",
            peers.loss_in_parallel,
            any_dtype("torch"),
            package="torch",
        ),
        optional(
            "torch loss_parallel, compiled",
            "torch",
            peers.loss_in_parallel,
            cuda("torch"),
            compiled=True,
        ),
        Implementation("liger of logits", peers.liger_of_logits, any_dtype(liger), package=liger),
        Implementation("liger tensor-parallel", peers.liger_sharded, any_dtype(liger), package=liger),
        optional("cut-cross-entropy vocab-parallel", cce, peers.cce_sharded, _cce_unsharded, filter_eps="high"),
        optional(
            "cut-cross-entropy vocab-parallel, no filter",
            cce,
            peers.cce_sharded,
            _cce_unsharded,
            filter_eps=None,
        ),
    )


# ------------------------------------------------------------------------------------------------------ peers in JAX


def _tokamax(implementation: str) -> Loss:
    from tokamax import linear_softmax_cross_entropy_loss

    return lambda hidden, weight, labels: linear_softmax_cross_entropy_loss(
        hidden, labels, weight, reduction="mean", implementation=implementation
    )


def _of_counted_tokens(problem: BenchProblem, loss: Loss, *, turned: bool = False) -> Mapping[str, Step]:
    """Steps of a function that has no ignored tokens and, if `turned`, takes the weight as [H, V]."""
    hidden, weight, labels = problem.arrays
    if bool((labels == IGNORED).any()):
        raise NotImplementedError("it has no ignore_index")
    return JAX.plain_steps(replace(problem, arrays=(hidden, weight.T if turned else weight, labels)), loss)


def _jax_implementations(fw: Any) -> Sequence[Implementation]:
    own = partial(_own, fw)
    optax = partial(plain, fw, losses=fw.by_optax)
    no_tokamax, turned = needs("tokamax"), partial(_of_counted_tokens, turned=True)
    load_cce = partial(imported, "jax_cce:linear_cross_entropy")
    return (
        own("onchip auto"),
        own("onchip, 64 MiB + 4TH", _small, "a budget for GPUs"),
        own("onchip, an eighth of the logits", partial(_part_of_logits, 8)),
        own("onchip, no bound", lambda fw, p: 1 << 60, "a budget for GPUs"),
        own("onchip xla", not_on_cpu="on the CPU it is the same as onchip auto", backend="xla"),
        *plain_peers("jax", partial(plain, fw)),
        Implementation("XLA, 16-bit logits, gathered", lambda: fw.narrow, xla_only_narrow, package="jax"),
        Implementation("optax, float32 logits", partial(optax, wide=True), needs("optax"), package="optax"),
        optional("tokamax xla", "tokamax", _tokamax, no_tokamax, turned, implementation="xla"),
        optional("tokamax chunked_xla", "tokamax", _tokamax, no_tokamax, turned, implementation="chunked_xla"),
        optional("jax-cce", "jax-cce", load_cce, needs("jax-cce"), _of_counted_tokens, chunk_size=4096),
    )


TORCH, JAX = (
    LossBenchmark(framework, checks.SUITES, implementations, _make, cross_entropies, forward=_returned)
    for framework, implementations in (("torch", _torch_implementations), ("jax", _jax_implementations))
)
WORLD = ShardedBenchmark(
    "torch", checks.WORLD_SUITES, _sharded_implementations, _make_sharded, cross_entropies, forward=_returned
)
