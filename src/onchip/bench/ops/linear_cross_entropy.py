"""The benchmark of linear_cross_entropy: its inputs, this op with several budgets, and its peers.

Bench cases are plain: mean over the tokens that are not ignored, no bias, no options; so every peer can run them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from onchip.bench.benchmark import Benchmark, Problem, cross_entropies, draw_linear
from onchip.bench.peers import (
    IGNORED,
    NARROW,
    Implementation,
    Peer,
    always,
    compiled,
    gpu_only,
    needs,
    no_compiler,
    only_narrow,
    optional,
    xla_only_narrow,
)
from onchip.core.sizes import MIB
from onchip.ops.linear_cross_entropy import cases
from onchip.ops.linear_cross_entropy.checks import plain_refusals
from onchip.oracle.checks import op_in
from onchip.vocab import memory

Loss = Callable[[Any, Any, Any], Any]
"""Mean cross-entropy of (hidden [T, H], weight [V, H], target [T]) over the tokens whose target is not IGNORED."""
ScratchBytes = Callable[[memory.Problem], int | None]
"""The budget for a problem; None for the op's default."""


def _make(fw: Any, case: cases.Case, device: str, dtype: str) -> Problem:
    plain = replace(case, logit_std=1.0, target_prob=None, zipf=False, ignored=0.0)
    assert plain == cases.Case(case.name, case.tokens, case.hidden, case.vocab)
    return Problem(draw_linear(fw, case, device, dtype))


# ----------------------------------------------------------------------------------------------------------- this op


def _sizes(fw: Any, problem: Problem, mode: str = "forward+backward") -> memory.Problem:
    """What the op's plan depends on."""
    hidden, weight, _ = problem.arrays
    backward = mode != "forward"
    return memory.Problem(
        len(hidden),
        hidden.shape[1],
        len(weight),
        dtype=fw.dtype_name(hidden.dtype),
        device=fw.device_of(hidden),
        grad_hidden=backward,
        grad_weight=backward,
        compacted=fw.NAME == "jax",
    )


def _default(p: memory.Problem) -> None:
    return None


def _no_bound(p: memory.Problem) -> int:
    return 1 << 60


def _small(framework: str, p: memory.Problem) -> int:
    """As the name says; in JAX, with many more tokens than H, what the kernels need for a useful chunk."""
    budget = 64 * MIB + 4 * p.tokens * p.hidden
    if framework == "torch":
        return budget
    from onchip.vocab.mosaic.memory import useful_scratch

    return max(budget, useful_scratch(p, "auto"))


def _part_of_logits(n: int, framework: str, p: memory.Problem) -> int:
    """The float32 logits' bytes / n, or what the smallest chunk needs."""
    if framework == "torch":
        least = memory.scratch_at_least(_at_worst(p), "recompute")
    else:
        from onchip.vocab.xla import memory as xla_memory

        least = xla_memory.scratch_at_least(p, "recompute")
    return max(memory.logits_bytes(p) // n, least)


def _at_worst(p: memory.Problem) -> memory.Problem:
    """What the op takes `p` for while it hasn't looked at the targets yet."""
    return replace(p, compacted=p.device == "cpu")


def _own(
    fw: Any, name: str, budget: ScratchBytes = _default, not_on_cpu: str | None = None, **options: Any
) -> Implementation:
    """This package's op with one budget and, in PyTorch, a strategy, in JAX a backend."""

    def unavailable(device: str, dtype: str) -> str | None:
        if device == "cpu":
            return not_on_cpu
        return plain_refusals(device, dtype, fw.NAME)[options["backend"]] if "backend" in options else None

    def record(problem: Problem, mode: str) -> dict[str, Any]:
        scratch = budget(_sizes(fw, problem))
        plan = _torch_plan if fw.NAME == "torch" else _jax_plan
        return plan(problem, _sizes(fw, problem, mode), scratch, **options)

    def steps(problem: Problem, peer: Peer) -> Mapping[str, Any]:
        scratch = budget(_sizes(fw, problem))
        made: Mapping[str, Any] = fw.steps(partial(peer.load(), scratch_bytes=scratch), problem.arrays, 2)
        return made

    op = op_in(fw, "linear_cross_entropy")
    return Implementation(Peer(name, lambda: partial(op, **options), unavailable, package="onchip"), steps, record)


def _torch_plan(problem: Problem, p: memory.Problem, scratch: int | None, strategy: str = "auto") -> dict[str, Any]:
    from onchip.vocab.triton import memory as triton_memory
    from onchip.vocab.triton.plan import refusal

    hidden = problem.arrays[0]
    if refusal(p.device, hidden.device.index, hidden.dtype) is None:
        return {"backend": "triton", "scratch_bytes": scratch, **vars(triton_memory.plan(p, strategy, scratch))}
    plan = memory.plan(p, memory.choose_strategy(_at_worst(p), strategy, scratch), scratch)
    return {"scratch_bytes": scratch, **vars(plan)}


def _jax_plan(problem: Problem, p: memory.Problem, scratch: int | None, backend: str = "auto") -> dict[str, Any]:
    from onchip.frontend.jax_call import Static
    from onchip.ops.linear_cross_entropy.jax_op import planned
    from onchip.oracle.jax import platform_of

    static = Static(backend, platform_of(p.device), p.dtype, "vh", "mean", "auto", scratch, return_stats=False)
    name, plan = planned(static, p)
    return {"backend": name, "scratch_bytes": scratch, **vars(plan)}


@dataclass(frozen=True)
class InFp8(Implementation):
    """This package's op with precision='fp8' on the kernels: an approximation, held to bounds of its own."""

    error_bounds: Mapping[str, float] = field(
        # The loss, and 25 dB of each gradient.
        default_factory=lambda: {"loss": 1e-3, "grad_hidden": 10 ** (-25 / 20), "grad_weight": 10 ** (-25 / 20)}
    )


def _in_fp8(fw: Any, name: str, before: bool) -> InFp8:
    """`before`: the weight is quantised before the timed steps, as for the later micro-batches of a step."""

    def unavailable(device: str, dtype: str) -> str | None:
        import torch

        from onchip.ops.linear_cross_entropy import fp8_op

        return fp8_op.refusals(torch.device(device))["triton"]

    def record(problem: Problem, mode: str) -> dict[str, Any]:
        from onchip.vocab.fp8 import memory as fp8_memory

        return {
            **options,
            "weight_quantised_before": before,
            "chunk": fp8_memory.plan(_sizes(fw, problem), None),
        }

    def steps(problem: Problem, peer: Peer) -> Mapping[str, Any]:
        from onchip.ops.fp8_linear.torch_op import quantize_weight

        function = peer.load()
        copies = quantize_weight(problem.arrays[1]) if before else None

        def loss(hidden: Any, weight: Any, target: Any) -> Any:
            return function(hidden, weight if copies is None else copies._replace(weight=weight), target)

        made: Mapping[str, Any] = fw.steps(loss, problem.arrays, 2)
        return made

    options = {"precision": "fp8", "backend": "triton"}
    op = op_in(fw, "linear_cross_entropy")
    return InFp8(Peer(name, lambda: partial(op, **options), unavailable, package="onchip"), steps, record)


# ------------------------------------------------------------------------------------------------- peers in PyTorch


def _eager(wide: bool = False) -> Loss:
    import torch.nn.functional as F

    from onchip.bench import torch_steps as fw

    return lambda hidden, weight, target: F.cross_entropy(fw.logits(hidden, weight, wide), target)


def _linear_cross_entropy() -> Loss:
    import torch.nn.functional as F

    return F.linear_cross_entropy


def _linear_cross_entropy_chunked() -> Loss:
    import torch

    return partial(torch.nn.functional.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())


def _older_torch(device: str, dtype: str) -> str | None:
    import torch

    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        return None
    return f"torch.nn.functional.linear_cross_entropy came with torch 2.13; this is {torch.__version__}"


def _liger(accum_dtype: str | None) -> Loss:
    import torch
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=getattr(torch, accum_dtype) if accum_dtype else None)
    return lambda hidden, weight, target: loss(weight, hidden, target)


def _cut_cross_entropy(filter_eps: str | None) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return partial(linear_cross_entropy, filter_eps=filter_eps)


def _quack(chunk_size: int, use_scaled_exp: bool) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return partial(chunked_linear_cross_entropy, chunk_size=chunk_size, use_scaled_exp=use_scaled_exp)


def _hopper_only(device: str, dtype: str) -> str | None:
    if refusal := gpu_only("quack-kernels", ("bfloat16",))(device, dtype):
        return refusal
    import torch

    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"it is for compute capability 9.0; this device has {major}.{minor}"


def _torch_peers(fw: Any) -> Sequence[Peer | Implementation]:
    own = partial(_own, fw)
    liger, cce, quack = "liger-kernel", "cut-cross-entropy", "quack-kernels"
    scaled = {"chunk_size": 1024, "use_scaled_exp": True}
    return (
        own("onchip auto", strategy="auto"),
        own("onchip, 64 MiB + 4TH", partial(_small, "torch"), "a budget for GPUs", strategy="auto"),
        own("onchip, an eighth of the logits", partial(_part_of_logits, 8, "torch"), "a budget for GPUs"),
        own("onchip, no bound", _no_bound, "a budget for GPUs", strategy="auto"),
        own("onchip stash", strategy="stash"),
        own("onchip recompute", partial(_part_of_logits, 16, "torch"), strategy="recompute"),
        _in_fp8(fw, "onchip fp8, approximate", before=False),
        _in_fp8(fw, "onchip fp8, approximate, weight quantised before", before=True),
        Peer("torch eager", _eager, always),
        Peer("torch eager, float32 logits", lambda: _eager(wide=True), only_narrow),
        Peer("torch.compile", lambda: compiled(_eager()), no_compiler),
        Peer("F.linear_cross_entropy", _linear_cross_entropy, _older_torch, {"options": None}),
        Peer(
            "F.linear_cross_entropy chunked",
            _linear_cross_entropy_chunked,
            _older_torch,
            {"options": "LinearCrossEntropyOptions()"},
        ),
        optional("liger", liger, _liger, gpu_only(liger, ("float32", *NARROW)), accum_dtype=None),
        optional("liger, float32 sums", liger, _liger, gpu_only(liger, NARROW), accum_dtype="float32"),
        optional("cut-cross-entropy", cce, _cut_cross_entropy, gpu_only(cce, NARROW), filter_eps="high"),
        optional("cut-cross-entropy, no filter", cce, _cut_cross_entropy, gpu_only(cce, NARROW), filter_eps=None),
        optional("quack base", quack, _quack, gpu_only(quack, NARROW), chunk_size=1024, use_scaled_exp=False),
        optional("quack scaled-exp", quack, _quack, _hopper_only, **scaled),
    )


# ------------------------------------------------------------------------------------------------------ peers in JAX


@dataclass(frozen=True)
class JaxPeer(Peer):
    """A function that may want the weight as [H, V], or know of no tokens that don't count."""

    weight_layout: str = "vh"
    """"vh" for a weight [V, H], "hv" for [H, V]: the gradient has the same."""
    ignores: bool = True


def plain(wide: bool, one_hot: bool = False) -> Loss:
    """The plain expression in JAX: logits in float32 if `wide`, else in hidden's dtype, and the rest in float32.

    The label's logit is gathered, or with `one_hot` summed behind a mask, which XLA fuses into its neighbours.
    """
    from onchip.bench import jax_steps as fw

    losses = _one_hot_losses if one_hot else fw.cross_entropies
    return lambda hidden, weight, labels: fw.mean_loss(losses, fw.logits(hidden, weight, wide), labels)


def _one_hot_losses(logits: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    chosen = jnp.where(jnp.arange(logits.shape[1]) == labels[:, None], logits, 0).sum(1)
    return jax.nn.logsumexp(logits, axis=1) - chosen


def _optax() -> Loss:
    import optax

    from onchip.bench import jax_steps as fw

    losses = optax.softmax_cross_entropy_with_integer_labels
    return lambda hidden, weight, labels: fw.mean_loss(losses, fw.logits(hidden, weight, wide=True), labels)


def _tokamax(implementation: str) -> Loss:
    from tokamax import linear_softmax_cross_entropy_loss

    return lambda hidden, weight, labels: linear_softmax_cross_entropy_loss(
        hidden, labels, weight, reduction="mean", implementation=implementation
    )


def _jax_cce(chunk_size: int) -> Loss:
    from jax_cce import linear_cross_entropy

    return partial(linear_cross_entropy, chunk_size=chunk_size)


def _jax_steps(problem: Problem, peer: Peer) -> Mapping[str, Any]:
    assert isinstance(peer, JaxPeer)
    hidden, weight, labels = problem.arrays
    if not peer.ignores and bool((labels == IGNORED).any()):
        raise NotImplementedError("it has no tokens that don't count")
    turned = weight.T if peer.weight_layout == "hv" else weight
    return JAX.steps(replace(problem, arrays=(hidden, turned, labels)), peer)


def _jax_peers(fw: Any) -> Sequence[Peer | Implementation]:
    own = partial(_own, fw)
    peers = (
        JaxPeer("XLA, 16-bit logits", lambda: plain(wide=False), xla_only_narrow, package="jax"),
        JaxPeer(
            "XLA, 16-bit logits, one-hot",
            lambda: plain(wide=False, one_hot=True),
            xla_only_narrow,
            {"one_hot": True},
            "jax",
        ),
        JaxPeer("XLA, float32 logits", lambda: plain(wide=True), always, package="jax"),
        JaxPeer("optax, float32 logits", _optax, needs("optax"), package="optax"),
        *(
            JaxPeer(
                f"tokamax {name}",
                partial(_tokamax, name),
                needs("tokamax"),
                {"implementation": name},
                "tokamax",
                weight_layout="hv",
                ignores=False,
            )
            for name in ("xla", "chunked_xla")
        ),
        JaxPeer("jax-cce", lambda: _jax_cce(4096), needs("jax-cce"), {"chunk_size": 4096}, "jax-cce", ignores=False),
    )
    return (
        own("onchip auto"),
        own("onchip, 64 MiB + 4TH", partial(_small, "jax"), "a budget for GPUs"),
        own("onchip, an eighth of the logits", partial(_part_of_logits, 8, "jax")),
        own("onchip triton", not_on_cpu="it runs on GPUs", backend="triton"),
        own("onchip xla", not_on_cpu="on the CPU it is the same as onchip auto", backend="xla"),
        *(Implementation(peer, _jax_steps) for peer in peers),
    )


TORCH = Benchmark("torch", cases, _make, _torch_peers, cross_entropies)
JAX = Benchmark("jax", cases, _make, _jax_peers, cross_entropies)
