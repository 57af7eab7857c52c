"""The benchmark of attention: its inputs, its peers, and how results are checked."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onchip.attention.masks import Intervals
from onchip.bench.harness import BenchedOp
from onchip.bench.peers import NARROW, Implementation, Refusal, always, gpu_only, no_compiler, own
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

    def seen(self, rows: slice, keys: slice = slice(None)) -> Any:
        """[B or 1, rows, keys] bool: what some queries see of some keys."""
        mask, tokens = self.mask, self.case.tokens
        at = np.arange(tokens, dtype=np.int32)
        like = mask.start
        i, j = (_beside(like, x) for x in (at[None, rows, None], at[None, None, keys]))
        seen = (mask.start[:, rows, None] <= j) & (j < mask.end[:, rows, None])
        return seen if mask.stop is None else seen & (i < mask.stop[:, None, keys])


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
# Pairs of a query and a key it sees, of all heads, that are checked: those of 16384 tokens that all see each other.
_CHECKED = 32 * 16384**2
# The product that stands for the floor has more rows if it would have more columns than these.
_COLUMNS = 1 << 16


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
        case = problem.case
        pairs = _pairs(problem) * case.heads
        sizes = case.size + case.value_size
        flops = 2 * pairs * (sizes if mode == "forward" else sizes + 3 * case.size + 2 * case.value_size)
        device = "cuda" if "cuda" in str(getattr(problem.q, "device", "")) else "cpu"
        side = 8192 if device == "cuda" else min(8192, case.tokens)
        if flops > 2 * side**2 * _COLUMNS:
            side = math.isqrt(flops // (2 * _COLUMNS)) // 128 * 128
        columns = max(1, round(flops / (16 * side**2))) * 8  # rows that are aligned
        normal, dtype = self.fw.drawer(device), dtype_name(problem.q.dtype)
        a, b = (normal(side, columns, dtype=dtype) for _ in range(2))
        step: Step = self.fw.without_gradients(lambda a, b: [a @ b.T], a, b)
        return step

    def reference(self, problem: AttentionBenchProblem) -> dict[str, tuple[dict[int, Any], tuple[int, ...], float]]:
        """The exact results of the groups of heads that are checked, computed in float64, with their bounds."""
        case, dtype = problem.case, dtype_name(problem.q.dtype)
        with self.fw.in_float64():
            right = _in_float64(self.fw, problem)
            checked = cases.AttentionCase(
                case.name, "full", case.batch, case.tokens, case.tokens, case.heads, case.key_heads, case.size,
                case.value_size,
            )  # fmt: skip
            # All kernels round probabilities before the product with values.
            bounds = limits(checked, dtype, {} if dtype == "float32" else {"backend": "triton"}, _NO_NUMBERS, {})
        shapes = dict(zip(RETURNED, (problem.grad_out, problem.q, problem.k, problem.v), strict=True))
        return {name: (right[name], tuple(shapes[name].shape), bounds[name][1]) for name in RETURNED}

    def check(self, reference: Mapping[str, Any], mode: str, returned: Sequence[Any]) -> dict[str, tuple[float, float]]:
        """The relative error of each result, in the heads that are checked."""
        found = {}
        for name, made in zip(RETURNED, returned, strict=False):
            heads, shape, bound = reference[name]
            if tuple(made.shape) != shape:
                raise ValueError(f"{name} has shape {list(made.shape)} where {list(shape)} is right")
            error = norm = 0.0
            for h, right in heads.items():
                with self.fw.in_float64():
                    a, b = self.fw.wide(made[:, :, h]), self.fw.wide(right)
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


def _pairs(problem: AttentionBenchProblem) -> int:
    """How many pairs of a query and a key are seen, in all rows of the batch."""
    case, mask = problem.case, problem.mask
    if mask.stop is not None:
        pairs = sum(int(problem.seen(rows).sum()) for rows in _blocks(case.tokens))
    else:
        pairs = int((mask.end - mask.start).clip(0).sum())
    return pairs * (case.batch // len(mask.start))


def _checked_groups(problem: AttentionBenchProblem) -> list[int]:
    """The key heads that are checked, with their queries' heads: all, or as many as `_CHECKED` allows, evenly."""
    case = problem.case
    most = _CHECKED // max(1, _pairs(problem) * (case.heads // case.key_heads))
    count = min(case.key_heads, max(1, most))
    return [case.key_heads - 1 - i * case.key_heads // count for i in range(count)]


def _in_float64(fw: Any, p: AttentionBenchProblem) -> dict[str, dict[int, Any]]:
    """out and the gradients by heads, kept in float32: [B, T, D] each.  A block of queries takes its range of keys."""
    case, group, scale = p.case, p.case.heads // p.case.key_heads, p.case.size**-0.5
    made: dict[str, dict[int, Any]] = {name: {} for name in RETURNED}

    def range_of(rows: slice) -> slice:
        if fw.NAME == "jax":  # it would compile for each number of keys
            return slice(0, case.tokens)
        return slice(int(p.mask.start[:, rows].min()), int(p.mask.end[:, rows].max()))

    blocks = [(rows, range_of(rows)) for rows in _blocks(case.tokens)]
    for g in _checked_groups(p):
        k, v = (fw.wide(x[:, :, g]) for x in (p.k, p.v))
        of_k, of_v = 0 * k, 0 * v
        for h in range(g * group, (g + 1) * group):
            q, do = (fw.wide(x[:, :, h]) for x in (p.q, p.grad_out))
            outs, of_q = [], []
            for rows, keys in blocks:
                z = fw.xp.where(p.seen(rows, keys), q[:, rows] @ fw.xp.swapaxes(k[:, keys], 1, 2) * scale, -math.inf)
                most = fw.xp.amax(z, -1)[..., None]
                of_sink = 0.0 if p.sinks is None else fw.xp.exp(fw.wide(p.sinks[h]) - most)
                e = fw.xp.exp(z - most)
                e = e / (e.sum(-1)[..., None] + of_sink)
                out = e @ v[:, keys]
                outs.append(out)
                dp = do[:, rows] @ fw.xp.swapaxes(v[:, keys], 1, 2)
                dz = e * (dp - (do[:, rows] * out).sum(-1)[..., None]) * scale
                of_q.append(dz @ k[:, keys])
                of_k = fw.added(of_k, keys, fw.xp.swapaxes(dz, 1, 2) @ q[:, rows])
                of_v = fw.added(of_v, keys, fw.xp.swapaxes(e, 1, 2) @ do[:, rows])
            made["out"][h] = fw.constant(fw.xp.concatenate(outs, 1), "float32")
            made["grad_q"][h] = fw.constant(fw.xp.concatenate(of_q, 1), "float32")
        made["grad_k"][g] = fw.constant(of_k, "float32")
        made["grad_v"][g] = fw.constant(of_v, "float32")
    return made


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


def _sdpa(problem: AttentionBenchProblem, backend: str | None = None, *, matrix: bool = False) -> Callable[..., Any]:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _refuse_sinks(problem, "scaled_dot_product_attention")
    if not matrix and problem.case.mask not in ("causal", "full"):
        raise ValueError("without a matrix its mask is causal or full")
    seen = problem.seen(slice(None))[:, None] if matrix else None
    causal = not matrix and problem.case.mask == "causal"

    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (_turned(x) for x in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, backend)) if backend else nullcontext():
            return _turned(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=True))

    return call


def _flex(problem: AttentionBenchProblem, **options: Any) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mask, case, sinks = problem.mask, problem.case, problem.sinks
    if options:
        _refuse_sinks(problem, "this backend")
    start, end, stop = (None if x is None else x.expand(case.batch, -1) for x in (mask.start, mask.end, mask.stop))
    assert start is not None
    assert end is not None

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        made = (start[b, i] <= j) & (j < end[b, i])
        return made if stop is None else made & (i < stop[b, j])

    device = str(problem.q.device)
    blocks = create_block_mask(seen, case.batch, None, case.tokens, case.tokens, device=device)
    torch.compiler.reset()
    compiled: Callable[..., Any] = partial(torch.compile(flex_attention, dynamic=False), kernel_options=options or None)

    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (_turned(x) for x in (q, k, v))
        if sinks is None:
            return _turned(compiled(q, k, v, block_mask=blocks, enable_gqa=True))
        out, more = compiled(q, k, v, block_mask=blocks, enable_gqa=True, return_aux=AuxRequest(lse=True))
        # As transformers does it: the sink takes its share of the probability from the values.
        return _turned(out * torch.sigmoid(more.lse - sinks[:, None])[..., None].to(out.dtype))

    return call


def _sequences(problem: AttentionBenchProblem) -> tuple[Any, int]:
    """Where sequences or documents begin and the last one ends, and how long the longest is."""
    import torch

    case, mask = problem.case, problem.mask
    at = torch.arange(case.batch * case.tokens + 1, device=mask.start.device, dtype=torch.int32)
    if case.mask in ("documents", "mixed"):
        ends = at[torch.nn.functional.pad((mask.start[0] == at[:-1]), (0, 1), value=True)]
    else:
        ends = at[:: case.tokens].contiguous()
    return ends, int((ends[1:] - ends[:-1]).max())


def _varlen(problem: AttentionBenchProblem) -> Callable[..., Any]:
    from torch.nn.attention import varlen

    function: Callable[..., Any] = varlen.varlen_attn
    _refuse_sinks(problem, "varlen_attn")
    case = problem.case
    if case.mask not in ("causal", "full", "window", "documents", "mixed"):
        raise ValueError("its mask is causal, full, a window or documents")
    ends, longest = _sequences(problem)
    window = (case.length - 1 if case.mask == "window" else -1, -1 if case.mask == "full" else 0)
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(function).parameters else {}

    def call(q: Any, k: Any, v: Any) -> Any:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = function(*rows, ends, ends, longest, longest, window_size=window, **gqa)
        return out.unflatten(0, q.shape[:2])

    return call


def _flash(problem: AttentionBenchProblem) -> Callable[..., Any]:
    from flash_attn import flash_attn_func

    _refuse_sinks(problem, "flash-attn")
    case = problem.case
    if case.mask not in ("causal", "full", "window"):
        raise ValueError("its mask is causal, full or a window")
    window = (case.length - 1, 0) if case.mask == "window" else (-1, -1)
    return partial(flash_attn_func, causal=case.mask != "full", window_size=window)


def _flash_4(problem: AttentionBenchProblem, *, deterministic: bool = False) -> Callable[..., Any]:
    from flash_attn import cute

    case = problem.case
    if case.mask not in ("causal", "full", "window", "documents", "mixed"):
        raise ValueError("its mask is causal, full, a window or documents")
    window = (case.length - 1, 0) if case.mask == "window" else (None, None)
    how = {
        "causal": case.mask not in ("full", "window"), "window_size": window,
        "learnable_sink": problem.sinks, "deterministic": deterministic,
    }  # fmt: skip
    if case.mask not in ("documents", "mixed"):
        return lambda q, k, v: _first_of(cute.flash_attn_func(q, k, v, **how))
    ends, longest = _sequences(problem)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def call(q: Any, k: Any, v: Any) -> Any:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return _first_of(cute.flash_attn_varlen_func(*rows, **lengths, **how)).unflatten(0, q.shape[:2])

    return call


def _first_of(made: Any) -> Any:
    return made[0] if isinstance(made, tuple) else made


def _flex_refusal(device: str, dtype: str) -> str | None:
    if device == "cpu":
        return "on a CPU it has no backward"
    return no_compiler(device, dtype)


def _torch_implementations(fw: Any) -> tuple[Implementation, ...]:
    def unloaded() -> Callable[..., Any]:
        return _torch_implementations  # its steps import it

    def peer(name: str, make: Callable[..., Any], refusal: Refusal = always, package: str = "torch") -> Implementation:
        return Implementation(name, unloaded, refusal, package=package, steps=_steps_with(make))

    by_kernels, flash_4 = (gpu_only(name, NARROW, name) for name in ("torch", "flash-attn-4"))
    return (
        *_own(fw),
        peer("torch SDPA, mask as a matrix", partial(_sdpa, matrix=True)),
        peer("torch SDPA", _sdpa),
        peer("torch SDPA, cuDNN", partial(_sdpa, backend="CUDNN_ATTENTION"), by_kernels),
        peer("torch SDPA, flash", partial(_sdpa, backend="FLASH_ATTENTION"), by_kernels),
        peer("torch varlen_attn", _varlen, by_kernels),
        peer("torch flex_attention", _flex, _flex_refusal),
        peer("torch flex_attention, FLASH", partial(_flex, BACKEND="FLASH"), flash_4),
        peer("flash-attn", _flash, gpu_only("flash-attn", NARROW, "flash-attn"), "flash-attn"),
        peer("flash-attn-4", _flash_4, flash_4, "flash-attn-4"),
        peer("flash-attn-4, deterministic", partial(_flash_4, deterministic=True), flash_4, "flash-attn-4"),
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


def _tokamax(problem: AttentionBenchProblem) -> Callable[..., Any]:
    from tokamax import dot_product_attention

    _refuse_sinks(problem, "tokamax")
    case = problem.case
    if case.mask not in ("causal", "full", "window"):
        raise ValueError("its masks are matrices, but for causal, full and windows")
    window = {"local_window_size": (case.length - 1, 0)} if case.mask == "window" else {}
    return partial(dot_product_attention, is_causal=case.mask == "causal", implementation="mosaic", **window)


def _jla(problem: AttentionBenchProblem) -> Callable[..., Any]:
    from jla.ops.mosaic_gpu.attention import flash_attention

    case, start = problem.case, problem.mask.start
    if case.mask not in ("causal", "window", "documents", "mixed"):
        raise ValueError("its mask is causal, a window or documents")
    how = {"sliding_window": case.length} if case.mask == "window" else {}
    if case.mask in ("documents", "mixed"):  # a document's first token stands for it
        how["segment_ids"] = start + np.zeros((case.batch, 1), np.int32)
    return partial(flash_attention, sinks=problem.sinks, **how)


def _jax_implementations(fw: Any) -> tuple[Implementation, ...]:
    def unloaded() -> Callable[..., Any]:
        return _jax_implementations

    def peer(name: str, make: Callable[..., Any], package: str) -> Implementation:
        refusal = gpu_only(package, NARROW, "jax" if package == "jax" else package)
        return Implementation(name, unloaded, refusal, package=package, steps=_steps_with(make))

    name = "jax.nn.dot_product_attention"
    return (
        *_own(fw),
        Implementation(name, unloaded, package="jax", steps=_steps_with(_dot_product)),
        peer(f"{name}, cuDNN", _cudnn, "jax"),
        peer("tokamax mosaic", _tokamax, "tokamax"),
        peer("jax-linear-attention", _jla, "jax-linear-attention"),
    )


TORCH, JAX = (
    AttentionBenchmark(framework, cases.SUITES, implementations, _make)
    for framework, implementations in (("torch", _torch_implementations), ("jax", _jax_implementations))
)
