"""The benchmark of attention: its inputs, its peers, and how results are checked."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onchip.attention.masks import Intervals
from onchip.bench.harness import BenchedOp
from onchip.bench.peers import NARROW, Implementation, gpu_only, no_compiler, own
from onchip.bench.timing import Step
from onchip.ops.attention import cases, reference
from onchip.ops.attention.checks import limits
from onchip.oracle.checks import dtype_name, op_in

RETURNED = ("out", "grad_q", "grad_k", "grad_v")


@dataclass(frozen=True)
class AttentionBenchProblem:
    """Inputs of one case, in the dtype and on the device of the run."""

    case: cases.AttentionBenchCase
    q: Any  # [B, T, Hq, D]; in PyTorch leaves that require grad
    k: Any  # [B, T, Hk, D]
    v: Any  # [B, T, Hk, Dv]
    sinks: Any  # [Hq], or None
    mask: Intervals  # lowered
    grad_out: Any

    def options(self) -> dict[str, Any]:
        return {} if self.sinks is None else {"sinks": self.sinks}

    def seen(self, rows: slice) -> Any:
        """[B or 1, rows, T] bool: what some queries see."""
        mask, tokens = self.mask, self.case.tokens
        at = np.arange(tokens, dtype=np.int32)
        like = mask.start
        i, j = (_beside(like, x) for x in (at[None, rows, None], at[None, None]))
        seen = (mask.start[:, rows, None] <= j) & (j < mask.end[:, rows, None])
        return seen if mask.stop is None else seen & (i < mask.stop[:, None])


def _beside(like: Any, x: Any) -> Any:
    if type(like).__module__.partition(".")[0] != "torch":
        return x
    import torch

    return torch.from_numpy(x).to(like.device)


def _make(fw: Any, case: cases.AttentionBenchCase, device: str, dtype: str) -> AttentionBenchProblem:
    """The inputs of `case`, drawn on the device."""
    normal = fw.drawer(device)

    def drawn(heads: int, size: int) -> Any:
        rows = case.batch * case.tokens
        return normal(rows * heads, size, dtype=dtype).reshape(case.batch, case.tokens, heads, size)

    q, k = (fw.leaf(drawn(heads, case.size), dtype) for heads in (case.heads, case.key_heads))
    v = fw.leaf(drawn(case.key_heads, case.value_size), dtype)
    sinks = fw.constant(normal(1, case.heads).reshape(-1), dtype) if case.sinks else None
    mask = cases.bench_mask(case, lambda x: fw.ids(x, device)).lower(case.batch, case.tokens, case.tokens, q)
    return AttentionBenchProblem(case, q, k, v, sinks, mask, drawn(case.heads, case.value_size))


# Queries that the check takes at a time: their scores in float64 must fit.
_ROWS = 1024


@dataclass
class AttentionBenchmark(BenchedOp):
    """The benchmark in one framework."""

    def plain_steps(self, problem: AttentionBenchProblem, function: Callable[..., Any]) -> Mapping[str, Step]:
        """The steps of a differentiable function of q, k, v, the mask and options."""
        call = partial(_called, function, problem.mask, problem.options())
        steps: dict[str, Step] = self.fw.steps(call, (problem.q, problem.k, problem.v), 3, (problem.grad_out,))
        return steps

    def floor(self, problem: AttentionBenchProblem, mode: str) -> Step | None:
        """One dense product by cuBLAS, with as many operations as attention needs for the scores that are seen.

        Attention needs two products in forward, and five more in backward, one of which computes the scores again.
        """
        case, mask = problem.case, problem.mask
        if mask.stop is not None:
            pairs = sum(int(problem.seen(rows).sum()) for rows in _blocks(case.tokens))
        else:
            pairs = int((mask.end - mask.start).clip(0).sum())
        pairs *= case.heads * (case.batch // len(mask.start))
        sizes = case.size + case.value_size
        flops = 2 * pairs * (sizes if mode == "forward" else sizes + 3 * case.size + 2 * case.value_size)
        side = min(8192, case.tokens)
        inner = max(1, flops // (2 * side * side))
        device = "cuda" if "cuda" in str(getattr(problem.q, "device", "")) else "cpu"
        normal, dtype = self.fw.drawer(device), dtype_name(problem.q.dtype)
        a, b = (normal(side, inner, dtype=dtype) for _ in range(2))
        step: Step = self.fw.without_gradients(lambda a, b: [a @ b.T], a, b)
        return step

    def reference(self, problem: AttentionBenchProblem) -> dict[str, Any]:
        """The exact results, computed in float64 head by head, with their bounds."""
        case, dtype = problem.case, dtype_name(problem.q.dtype)
        with self.fw.in_float64():
            right = _in_float64(self.fw, problem)
            checked = cases.AttentionCase(
                case.name, "full", case.batch, case.tokens, case.tokens, case.heads, case.key_heads, case.size,
                case.value_size,
            )  # fmt: skip
            bounds = limits(checked, dtype, {}, _NO_NUMBERS, {})
        return {name: (right[name], bounds[name][1]) for name in RETURNED}

    def check(self, reference: Mapping[str, Any], mode: str, returned: Sequence[Any]) -> dict[str, tuple[float, float]]:
        """The relative error of each result."""
        found = {}
        for name, made in zip(RETURNED, returned, strict=False):
            right, bound = reference[name]
            if made.shape != right.shape:
                raise ValueError(f"{name} has shape {list(made.shape)} where {list(right.shape)} is right")
            error = norm = 0.0
            for h in range(right.shape[2]):
                with self.fw.in_float64():
                    a, b = self.fw.wide(made[:, :, h]), self.fw.wide(right[:, :, h])
                    error += float(((a - b) ** 2).sum())
                    norm += float((b**2).sum())
            found[name] = math.sqrt(error / norm), bound
        return found


_NO_NUMBERS = reference.AttentionResult(*[np.zeros(1)] * 6)
"""Stands for an oracle's results where bounds need only their names."""


def _called(function: Callable[..., Any], mask: Intervals, options: Mapping[str, Any], q: Any, k: Any, v: Any) -> Any:
    return function(q, k, v, mask, **options)


def _blocks(tokens: int) -> list[slice]:
    return [slice(i, min(i + _ROWS, tokens)) for i in range(0, tokens, _ROWS)]


def _in_float64(fw: Any, p: AttentionBenchProblem) -> dict[str, Any]:
    """out and the gradients, kept in float32: [B, T, H, D] each."""
    case, group, scale = p.case, p.case.heads // p.case.key_heads, p.case.size**-0.5
    made: dict[str, list[Any]] = {name: [] for name in RETURNED}
    for g in range(case.key_heads):
        k, v = (fw.wide(x[:, :, g]) for x in (p.k, p.v))
        of_k, of_v = 0 * k, 0 * v
        for h in range(g * group, (g + 1) * group):
            q, do = (fw.wide(x[:, :, h]) for x in (p.q, p.grad_out))
            outs, of_q = [], []
            for rows in _blocks(case.tokens):
                z = fw.xp.where(p.seen(rows), q[:, rows] @ fw.xp.swapaxes(k, 1, 2) * scale, -math.inf)
                most = fw.xp.amax(z, -1)[..., None]
                of_sink = 0.0 if p.sinks is None else fw.xp.exp(fw.wide(p.sinks[h]) - most)
                e = fw.xp.exp(z - most)
                e = e / (e.sum(-1)[..., None] + of_sink)
                out = e @ v
                outs.append(out)
                dz = e * (do[:, rows] @ fw.xp.swapaxes(v, 1, 2) - (do[:, rows] * out).sum(-1)[..., None]) * scale
                of_q.append(dz @ k)
                of_k = of_k + fw.xp.swapaxes(dz, 1, 2) @ q[:, rows]
                of_v = of_v + fw.xp.swapaxes(e, 1, 2) @ do[:, rows]
            made["out"].append(fw.constant(fw.xp.concatenate(outs, 1), "float32"))
            made["grad_q"].append(fw.constant(fw.xp.concatenate(of_q, 1), "float32"))
        made["grad_k"].append(fw.constant(of_k, "float32"))
        made["grad_v"].append(fw.constant(of_v, "float32"))
    return {name: fw.xp.stack(heads, 2) for name, heads in made.items()}


# -------------------------------------------------------------------------------------------------- implementations


def _own(fw: Any) -> list[Implementation]:
    return own(partial(partial, op_in(fw, "attention")), ())


def _turned(x: Any) -> Any:
    return x.swapaxes(1, 2)


def _steps_with(make: Callable[[AttentionBenchProblem], Callable[..., Any]]) -> Callable[..., Mapping[str, Step]]:
    """Steps of a function of q, k and v alone that is made for each problem, whose mask is built before."""

    def steps(problem: AttentionBenchProblem, load: Any) -> Mapping[str, Step]:
        target = TORCH if type(problem.q).__module__.partition(".")[0] == "torch" else JAX
        function = make(problem)
        arguments = problem.q, problem.k, problem.v
        made: Mapping[str, Step] = target.fw.steps(function, arguments, 3, (problem.grad_out,))
        return made

    return steps


def _refuse_sinks(problem: AttentionBenchProblem, what: str) -> None:
    if problem.sinks is not None:
        raise ValueError(f"{what} has no sinks")


def _sdpa(problem: AttentionBenchProblem, *, causal: bool) -> Callable[..., Any]:
    import torch.nn.functional as F

    _refuse_sinks(problem, "scaled_dot_product_attention")
    if causal and problem.case.mask != "causal":
        raise ValueError("without a matrix its mask is causal")
    seen = None if causal else problem.seen(slice(None))[:, None]

    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (_turned(x) for x in (q, k, v))
        return _turned(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=True))

    return call


def _flex(problem: AttentionBenchProblem) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _refuse_sinks(problem, "flex_attention")
    mask, case = problem.mask, problem.case
    start, end, stop = (None if x is None else x.expand(case.batch, -1) for x in (mask.start, mask.end, mask.stop))
    assert start is not None
    assert end is not None

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        made = (start[b, i] <= j) & (j < end[b, i])
        return made if stop is None else made & (i < stop[b, j])

    device = str(problem.q.device)
    blocks = create_block_mask(seen, case.batch, None, case.tokens, case.tokens, device=device)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Any, k: Any, v: Any) -> Any:
        return _turned(compiled(_turned(q), _turned(k), _turned(v), block_mask=blocks, enable_gqa=True))

    return call


def _flash(problem: AttentionBenchProblem) -> Callable[..., Any]:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    _refuse_sinks(problem, "flash-attn")
    case = problem.case
    if case.mask not in ("causal", "full", "window"):
        raise ValueError("its mask is causal, full or a window")
    window = (case.length - 1, 0) if case.mask == "window" else (-1, -1)
    return partial(flash_attn_func, causal=case.mask != "full", window_size=window)


def _flex_refusal(device: str, dtype: str) -> str | None:
    if device == "cpu":
        return "on a CPU it has no backward"
    return no_compiler(device, dtype)


def _torch_implementations(fw: Any) -> tuple[Implementation, ...]:
    def unloaded() -> Callable[..., Any]:
        return _torch_implementations  # its steps import it

    on_gpu = gpu_only("flash-attn", NARROW, "flash-attn")
    matrix, causal = (_steps_with(partial(_sdpa, causal=x)) for x in (False, True))
    return (
        *_own(fw),
        Implementation("torch SDPA, mask as a matrix", unloaded, steps=matrix),
        Implementation("torch SDPA, causal", unloaded, steps=causal),
        Implementation("torch flex_attention", unloaded, _flex_refusal, steps=_steps_with(_flex)),
        Implementation("flash-attn", unloaded, on_gpu, package="flash-attn", steps=_steps_with(_flash)),
    )


def _dot_product(problem: AttentionBenchProblem) -> Callable[..., Any]:
    import jax

    _refuse_sinks(problem, "jax.nn.dot_product_attention")
    seen = problem.seen(slice(None))[:, None]
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=seen)


def _cudnn(problem: AttentionBenchProblem) -> Callable[..., Any]:
    import jax

    _refuse_sinks(problem, "cuDNN")
    case = problem.case
    if case.mask not in ("causal", "full", "window"):
        raise ValueError("its mask is causal, full or a window")
    how = {"is_causal": case.mask != "full", "implementation": "cudnn"}
    window = {"local_window_size": (case.length - 1, 0)} if case.mask == "window" else {}
    return partial(jax.nn.dot_product_attention, **how, **window)


def _jax_implementations(fw: Any) -> tuple[Implementation, ...]:
    def unloaded() -> Callable[..., Any]:
        return _jax_implementations

    name, on_gpu = "jax.nn.dot_product_attention", gpu_only("jax", NARROW, "jax")
    return (
        *_own(fw),
        Implementation(name, unloaded, package="jax", steps=_steps_with(_dot_product)),
        Implementation(f"{name}, cuDNN", unloaded, on_gpu, package="jax", steps=_steps_with(_cudnn)),
    )


TORCH, JAX = (
    AttentionBenchmark(framework, cases.SUITES, implementations, _make)
    for framework, implementations in (("torch", _torch_implementations), ("jax", _jax_implementations))
)
