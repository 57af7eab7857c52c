"""What can be planned: each op's backends, what their planners say, and what the plain expression needs.

A new op is an entry of `OPS`.  No framework.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from onchip.collectives import problem as collective
from onchip.core.sizes import DTYPE_BYTES
from onchip.fp8 import numbers as fp8
from onchip.fp8.numbers import quantized_bytes
from onchip.groups import problem as grouped
from onchip.groups.triton.tiles import copying_rows_pays, plan_numbers
from onchip.ops.collective_matmul.fp8_cost import fp8_cost
from onchip.ops.linear_jsd import memory as jsd_memory
from onchip.ops.linear_jsd import triton_memory as jsd_triton_memory
from onchip.plan.gpus import GPUS, faster_memory, faster_products, fp8_ms, grouped_ms, product_ms, rates
from onchip.vocab import memory
from onchip.vocab.chunks import Config, Planner
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.mosaic.memory import MosaicPlan
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton import planner as triton_planner
from onchip.vocab.xla import memory as xla_memory


@dataclass(frozen=True)
class Asked:
    """The call that is planned; of a tensor-parallel one, what one rank does."""

    op: str
    problem: Problem
    """`hidden` 0 for an op that has none."""
    framework: str
    precision: str
    gpu: str
    gradients: bool
    entropy: bool = False
    teacher_hidden: int = 0
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """In and out features of the linear layers."""
    experts: int = 0
    """Of grouped_matmul."""
    rows: int = 0
    """Of x, where the product reads them by an index; or 0."""
    ranks: int = 1
    """That share a layer, of collective_matmul."""


class Step(NamedTuple):
    """What a call does in one budget."""

    memory_parts: dict[str, int]
    """Bytes at the peak, above inputs, results and returned gradients."""
    products: float
    """Matrix products of tokens x hidden x vocab."""
    recomputed: int
    """Tokens whose logits backward computes again."""
    chunk: dict[str, int]
    """Tokens, and entries of the vocabulary, that are worked on at a time."""
    ms: float | None
    """None where there is no model of the backend's time."""
    sent: int | None = None
    """Bytes that a rank sends; None for an op of one."""


@dataclass(frozen=True)
class Way:
    """How a backend runs the call: all that a plan says of it is made of these."""

    step: Callable[[str, int | None], Step]
    """What a strategy does in a budget, by default its own; raises ValueError where that is too small."""
    least: Callable[[str], int]
    """Bytes of the smallest budget that a strategy runs in."""
    default: Callable[[str], int]
    """Bytes of the budget that a strategy takes by default."""
    strategies: tuple[str, ...] = ("auto",)
    chosen: Callable[[int | None], str] = lambda budget: "auto"
    """The strategy that a call takes in a budget; raises ValueError as `step` does."""


class Plain(NamedTuple):
    """What the op replaces: its expression in the framework's own functions."""

    name: str
    expression: str
    memory: int | None = None
    ms: float | None = None


class Layer(NamedTuple):
    """How an op without budgets runs a linear layer of those that are asked for."""

    step: Callable[[Asked, str, str], Step]
    """What it does for the layer of a name, by a backend."""
    plain_ms: Callable[[Asked, tuple[int, int]], float | None]
    """The predicted time of what it replaces, of so many in and out features; None where there is no model of it."""

    def plain(self, asked: Asked, name: str, expression: str) -> Plain:
        """What all layers replace."""
        times = [self.plain_ms(asked, features) for features in asked.linears.values()]
        known = [ms for ms in times if ms is not None]
        return Plain(name, expression, None, sum(known) if len(known) == len(times) else None)


class Backend(NamedTuple):
    """A backend of an op; of several the first that refuses nothing is the one that the op takes."""

    refusal: Callable[[Asked], str | None]
    way: Callable[[Asked], Way]


@dataclass(frozen=True)
class Op:
    """One op, as `onchip plan` knows it."""

    backends: Mapping[tuple[str, str], Mapping[str, Backend]]
    """By framework and precision, and by name in the order in which the op tries them."""
    plain: Callable[[Asked], Plain]
    needs: tuple[str, ...] = ("hidden", "vocab")
    takes: tuple[str, ...] = ()
    """Sizes and options that it knows besides."""
    layer: Layer | None = None
    """Of an op that has a row for each layer."""
    source: str = ""
    """Where its times come from, if not from what its GPU says."""
    logits: int = 1
    """Logits per token and entry of the vocabulary."""
    softcap: bool = True
    """Whether it can cap the logits."""
    ids: int = 0
    """Ids per token, of log-probabilities."""
    numbers: int = 3
    """Float32 a token that ranks which share the vocabulary gather: lse, what it was rounded by, and the target's
    log-probability; 0 where that is not known."""


# ---------------------------------------------------------------------------------------------- what backends refuse


def _never(asked: Asked) -> None:
    return None


def _triton(asked: Asked) -> str | None:
    p = asked.problem
    # Kernels without products read float32 as well.
    if p.device == "cuda" and (p.dtype != "float32" or not p.hidden):
        return None
    return f"its kernels don't run in {p.dtype} on {p.device}"


def _mosaic(asked: Asked) -> str | None:
    p = asked.problem
    refusal = mosaic_memory.refusal(p, "gpu" if p.device == "cuda" else p.device, weight_layout="vh")
    return refusal or _hopper(asked)


def _fp8_triton(asked: Asked) -> str | None:
    return _only_cuda(asked) or _hopper(asked)


def _hopper(asked: Asked) -> str | None:
    gpu = GPUS[asked.gpu]
    if gpu.capability == (9, 0):
        return None
    return f"it needs compute capability 9.0 (Hopper), and a {gpu.title} has {gpu.capability[0]}.{gpu.capability[1]}"


def _only_cuda(asked: Asked) -> str | None:
    return None if asked.problem.device == "cuda" else f"its kernels don't run on {asked.problem.device}"


def _fp8_capable(asked: Asked) -> str | None:
    gpu = GPUS[asked.gpu]
    lacks = None if gpu.capability >= (8, 9) else f"FP8 needs compute capability 8.9, and a {gpu.title} has 8.0"
    return _only_cuda(asked) or lacks


# ------------------------------------------------------------------------------------- losses of a linear layer


def _problem(asked: Asked) -> Problem:
    """With no gradients where none are wanted."""
    p = asked.problem
    return p if asked.gradients else replace(p, grad_hidden=False, grad_weight=False)


def _products(asked: Asked) -> int:
    """That the call can't do without: the logits', hidden's gradient and the weight's."""
    return 1 if not asked.gradients else 2 + asked.problem.grad_weight


def _kernels(
    planner: Planner[Any],
    p: Any,
    products: tuple[int, int, int],
    predict: Callable[[Any, Any], float] | None,
    sizes: Callable[[Any], dict[str, int]],
    strategies: tuple[str, ...] = ("auto",),
) -> Way:
    """A backend that keeps as many tokens' logits as the budget allows.

    `products`: without gradients, with them, and how many more where all tokens' logits are recomputed.
    """
    alone, training, again = products

    def step(strategy: str, budget: int | None) -> Step:
        c = planner.plan(p, strategy, budget)
        in_forward = getattr(c, "in_forward", False) or getattr(c, "by_tokens", False)
        recomputed = 0 if in_forward or not p.any_grad else max(0, p.tokens - c.kept)
        number = training + again * recomputed / max(1, p.tokens) if p.any_grad else alone
        ms = None if predict is None else predict(p, c)
        return Step(planner.parts(p, c), number, recomputed, sizes(c), ms)

    return Way(step, partial(planner.least, p), partial(planner.default, p), strategies)


def _triton_way(asked: Asked) -> Way:
    p, of_gpu = _problem(asked), rates(asked.gpu)
    strategies = ("auto", "stash", "recompute") if asked.gradients and not p.ids else ("auto",)
    predict = partial(triton_planner.predict, rates=of_gpu)
    return _kernels(triton_planner.PLANNER, p, (1, _products(asked), 1), predict, _triton_sizes, strategies)


def _triton_sizes(c: triton_memory.TritonPlan) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.vocab_chunk, "weight_gradient_rows": c.weight_chunk}


def _mosaic_way(asked: Asked) -> Way:
    strategies = ("auto", "stash", "recompute") if asked.gradients else ("auto",)

    def predict(p: Problem, c: MosaicPlan) -> float:
        return mosaic_memory.predict(p, c) / faster_products(asked.gpu)

    products = 1, _products(asked), 1
    return _kernels(mosaic_memory.PLANNER, _problem(asked), products, predict, _mosaic_sizes, strategies)


def _mosaic_sizes(c: MosaicPlan) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.recompute_chunks * c.chunk, "weight_gradient_rows": c.chunk}


def _of_products(module: Any) -> Callable[[Asked], Way]:
    """A backend of the framework's own products; `module` has its planner and its choice of a strategy."""

    def way(asked: Asked) -> Way:
        p, planner = _problem(asked), module.PLANNER
        strategies = ("stash", "recompute") if asked.gradients else ("forward",)
        number = _products(asked)

        def step(strategy: str, budget: int | None) -> Step:
            c: Config = planner.plan(p, strategy, budget)
            again = strategy == "recompute"
            return Step(planner.parts(p, c), number + again, p.tokens if again else 0, _cut(c), None)

        chosen = partial(module.choose_strategy, p, "auto")
        return Way(step, partial(planner.least, p), partial(planner.default, p), strategies, chosen)

    return way


def _cut(c: Config) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.vocab_chunk}


def _log_probs_of_products(planner: Planner[Config], *, both_walks: bool) -> Callable[[Asked], Way]:
    """Forward, and a backward that computes the logits again; `both_walks`: each plans for itself, where JAX has one
    plan for both."""

    def way(asked: Asked) -> Way:
        p = _problem(asked)
        strategy = "recompute" if asked.gradients else "forward"
        walks = ("forward", "recompute") if asked.gradients and both_walks else (strategy,)

        def step(_: str, budget: int | None) -> Step:
            planner.require(p, strategy, budget)
            plans = [planner.plan(p, walk, budget) for walk in walks]
            parts = max((planner.parts(p, c) for c in plans), key=lambda parts: sum(parts.values()))
            again = asked.gradients
            return Step(parts, _products(asked) + again, p.tokens if again else 0, _cut(plans[-1]), None)

        return Way(step, lambda _: planner.least(p, strategy), lambda _: planner.default(p, strategy))

    return way


def _fp8_way(asked: Asked) -> Way:
    p, triton = _problem(asked), asked.problem.device == "cuda"

    def step(_: str, budget: int | None) -> Step:
        chunk = fp8_memory.plan(p, budget)
        product, logits = p.tokens * p.hidden * p.vocab, p.tokens * p.vocab
        # The weight is read and quantised in both orientations.  Logits are written, read, and quantised in both.
        quantised = (DTYPE_BYTES[p.dtype] + 1 + asked.gradients) * p.vocab * p.hidden + (
            6 if p.any_grad else 4
        ) * logits
        outputs, weights = (2 * product, product * p.grad_weight) if p.any_grad else (product, 0)
        # Smaller chunks than the default's were not measured.
        measured = triton and chunk >= min(p.tokens, fp8_memory.DEFAULT_CHUNK)
        ms = fp8_ms(asked.gpu, outputs, weights, quantised) if measured else None
        return Step(fp8_memory.scratch_parts(p, chunk), _products(asked), 0, {"tokens": chunk}, ms)

    planner = fp8_memory.PLANNER
    return Way(step, lambda _: planner.least(p, ""), lambda _: fp8_memory.scratch_bytes(p, fp8_memory.plan(p, None)))


def _fp8_torch_way(asked: Asked) -> Way:
    # The framework's own products take what they take on the CPU.
    return _fp8_way(replace(asked, problem=replace(asked.problem, device="cpu")))


# --------------------------------------------------------------------------------------------------- the other losses


def _rows_way(asked: Asked, *, triton: bool = False, xla: bool = False) -> Way:
    of, planner = asked.problem, row_memory.PLANNER
    p = row_memory.Problem(
        tokens=of.tokens,
        vocab=of.vocab,
        dtype=of.dtype,
        device=of.device,
        grad=asked.gradients,
        softcap=of.softcap,
        triton=triton,
        xla=xla,
    )

    def step(_: str, budget: int | None) -> Step:
        rows = planner.plan(p, "", budget)
        ms = None
        if p.triton and p.device == "cuda":
            # Read once, and the gradient written: results/2026-11-22-h100-cross_entropy.json, where rows are long.
            per_byte = 0.41 if asked.gradients else 0.34
            moved = p.tokens * p.vocab * DTYPE_BYTES[p.dtype] * (2 if asked.gradients else 1)
            ms = 1e-9 * per_byte * moved / faster_memory(asked.gpu)
        return Step(planner.parts(p, rows), 0, 0, {"tokens": rows}, ms)

    return Way(step, lambda _: planner.least(p, ""), lambda _: planner.default(p, ""))


def _jsd_problem(asked: Asked, *, stash: bool) -> jsd_memory.Problem:
    student = _problem(asked)
    teacher = replace(asked.problem, hidden=asked.teacher_hidden, grad_hidden=False, grad_weight=False)
    return jsd_memory.Problem(student.vocab, student, teacher, stash=stash and asked.gradients)


def _jsd_way(planner: Planner[int]) -> Callable[[Asked], Way]:
    def way(asked: Asked) -> Way:
        p = _jsd_problem(asked, stash=True)

        def step(_: str, budget: int | None) -> Step:
            chunk = planner.plan(p, "", budget)
            return Step(planner.parts(p, chunk), 4 if asked.gradients else 2, 0, {"tokens": chunk}, None)

        return Way(step, lambda _: planner.least(p, ""), lambda _: planner.default(p, ""))

    return way


def _jsd_triton_way(asked: Asked) -> Way:
    p = _jsd_problem(asked, stash=False)
    predict = partial(jsd_triton_memory.predict, rates=rates(asked.gpu))

    def sizes(c: jsd_triton_memory.JsdPlan) -> dict[str, int]:
        return {"tokens": c.token_chunk, "vocab": c.vocab_chunk, "weight_gradient_rows": c.weight_chunk}

    way = _kernels(jsd_triton_memory.PLANNER, p, (2, 4, 2), predict, sizes)
    return replace(way, step=lambda _, budget: way.step("", budget))


# -------------------------------------------------------------------------------------------------- layers of a model


def _fp8_step(asked: Asked, name: str, backend: str) -> Step:
    """One linear layer in FP8: memory as docs/ops/fp8_linear.md has it, time by the measured products and quantiser."""
    (k, n), m, grad = asked.linears[name], asked.problem.tokens, asked.gradients
    p = fp8.Problem(m, n, k, asked.problem.dtype)
    saved = {"kept until backward: x and weight in FP8": fp8.saved_bytes(p)} if grad else {}
    forward = {"x in FP8": quantized_bytes(m, k), "weight in FP8": fp8.block_quantized_bytes(n, k)}
    backward = {"the output's gradient in FP8": fp8.gradient_bytes(p)} if grad else {}
    parts = saved | max((forward, backward), key=lambda phase: sum(phase.values()))
    product = m * n * k
    of_x, of_weight = ((DTYPE_BYTES[d] + 1 + grad) for d in (asked.problem.dtype, asked.problem.weight_dtype))
    moved = of_x * m * k + of_weight * n * k + (of_x * m * n if grad else 0)
    outputs, weights = (1 + grad) * product, product if grad else 0
    ms = fp8_ms(asked.gpu, outputs, weights, moved) if backend == "scaled_mm" else None
    return Step(parts, 3 if grad else 1, 0, {"tokens": m, "in_features": k, "out_features": n}, ms)


def _linear_ms(asked: Asked, features: tuple[int, int]) -> float | None:
    """nn.Linear in the same dtype; None where no rates of its products are known."""
    if not _has_rates(asked):
        return None
    return product_ms(asked.gpu, (3 if asked.gradients else 1) * asked.problem.tokens * features[0] * features[1])


def _grouped_step(asked: Asked, name: str, backend: str) -> Step:
    """The products of experts: memory as docs/ops/grouped_matmul.md has it, its way through the kernels."""
    (k, n), p, groups, grad = asked.linears[name], asked.problem, asked.experts, asked.gradients
    size, sums = DTYPE_BYTES[p.dtype], 3 if grad else 1
    rows = asked.rows or p.tokens
    numbers = plan_numbers(grouped.Problem(p.tokens, rows, groups, n, k, n, p.tokens))
    parts = {"kept until backward: the tiles' plan" if grad else "the tiles' plan": 4 * numbers}
    if p.weight_dtype != p.dtype:
        parts["kept until backward: autocast's weight" if grad else "autocast's weight"] = size * groups * n * k
    if asked.rows:
        parts["kept until backward: rows, checked" if grad else "rows, checked"] = 4 * p.tokens
        if grad:
            parts["x's gradient before it is summed up"] = size * p.tokens * k
            parts["rows, sorted"] = 12 * p.tokens + 12 * (rows + 1)
        elif size == 2 and GPUS[asked.gpu].capability == (9, 0) and copying_rows_pays(n, activation=False):
            parts["rows, copied"] = size * p.tokens * k
    return Step(parts, sums, 0, {"tokens": p.tokens, "in_features": k, "out_features": n}, _grouped_ms(asked, (k, n)))


def _grouped_ms(asked: Asked, features: tuple[int, int]) -> float | None:
    """None where no rates of its products are known."""
    if not _has_rates(asked):
        return None
    multiplications = asked.problem.tokens * features[0] * features[1]
    weight_bytes = DTYPE_BYTES[asked.problem.dtype] * asked.experts * features[0] * features[1]
    return grouped_ms(asked.gpu, multiplications, weight_bytes, gradients=asked.gradients)


def _grouped_mm_ms(asked: Asked, features: tuple[int, int]) -> float | None:
    """PyTorch's own took about 1.1 times as long, on an H100 in bfloat16."""
    ms = _grouped_ms(asked, features)
    return None if ms is None else 1.1 * ms


# Layers that sum up what the ranks have; the others widen what all of them are given.
ROW_PARALLEL = ("row parallel", "attention out", "down")


def _collective_step(asked: Asked, name: str, backend: str) -> Step:
    """A linear layer that ranks share: memory as docs/ops/collective_matmul.md has it."""
    (k, n), p, ranks = asked.linears[name], asked.problem, asked.ranks
    by_rows = name in ROW_PARALLEL
    shared, of = (k, "in_features") if by_rows else (n, "out_features")
    if p.tokens % ranks or shared % ranks:
        wrong = ("tokens", p.tokens) if p.tokens % ranks else (f"{of} of {name}", shared)
        raise ValueError(f"plan: {wrong[0]} are {wrong[1]}, which {ranks} ranks can't share evenly")
    k, n = (k // ranks, n) if by_rows else (k, n // ranks)
    rows, fp8_too = p.tokens // ranks, asked.precision == "fp8"
    if fp8_too and ranks > 1 and rows % fp8.BLOCK:
        raise ValueError(
            f"plan: with precision 'fp8' each rank's tokens must be a multiple of {fp8.BLOCK}; {p.tokens} by {ranks} "
            f"ranks are {rows}"
        )
    made = (fp8_cost if fp8_too else collective.cost)(
        collective.SCATTER if by_rows else collective.GATHER,
        collective.Sizes(ranks, rows, n, k),
        DTYPE_BYTES[p.dtype],
        gradients=asked.gradients,
        weight_bytes=DTYPE_BYTES[p.weight_dtype],
    )
    parts = max(made.forward, made.backward, key=lambda phase: sum(phase.values()))
    if fp8_too:
        parts = {f"kept until backward: {name}": size for name, size in made.kept.items()} | parts
    elif p.weight_dtype != p.dtype:
        parts = {"kept until backward: autocast's weight": DTYPE_BYTES[p.dtype] * n * k} | parts
    sizes = {"tokens": p.tokens, "in_features": k, "out_features": n}
    return Step(parts, 3 if asked.gradients else 1, 0, sizes, None, made.sent)


def _no_ms(asked: Asked, features: tuple[int, int]) -> None:
    return None


def _layers(asked: Asked) -> Way:
    raise AssertionError(f"{asked.op} has a row for each layer, and no budgets")


# -------------------------------------------------------------------------------------------------- what ops replace


def _has_rates(asked: Asked) -> bool:
    return asked.problem.device == "cuda" and asked.problem.dtype != "float32"


def _gradient_bytes(asked: Asked) -> int:
    """Of those that are returned: where they come after the peak, their memory was part of it."""
    p = asked.problem
    of_weight = DTYPE_BYTES[p.weight_dtype] * p.vocab * p.hidden * p.grad_weight
    return DTYPE_BYTES[p.hidden_dtype] * p.tokens * p.hidden + of_weight if asked.gradients else 0


# Launches of a plain step, and of its forward alone: what few tokens take.
_STEP_KERNELS, _KERNELS = 8, 4


class _Measured(NamedTuple):
    """What the plain expression was measured to take for each logit on an H100, of a step and of forward alone."""

    name: str
    expression: str
    step_bytes: int
    step_ps: float
    bytes: int
    ps: float

    def plain(self, asked: Asked, products: int, *, after_peak: int = 0) -> Plain:
        """`after_peak`: bytes of gradients that are not there yet at the peak."""
        p = asked.problem
        logits = p.tokens * p.vocab
        per_logit, ps = (self.step_bytes, self.step_ps) if asked.gradients else (self.bytes, self.ps)
        # Behind the peak there are the logits' gradient in its dtype, and what is made of it.
        least = DTYPE_BYTES[p.dtype] * logits
        size = max(per_logit * logits - after_peak, least)
        ms = None
        if _has_rates(asked):
            product = product_ms(asked.gpu, p.tokens * p.hidden * p.vocab)
            kernels = (_STEP_KERNELS if asked.gradients else _KERNELS) * 1e-3 * rates(asked.gpu).launch
            ms = products * product + 1e-9 * ps * logits / faster_memory(asked.gpu) + kernels
        return Plain(self.name, self.expression, size, ms)

    def unknown(self) -> Plain:
        """Where nothing was measured."""
        return Plain(self.name, self.expression)


# Bytes follow from what autograd keeps.  Times are those of results/2026-11-21-h100-linear_cross_entropy.json and
# results/2026-11-22-h100-*.json: of linear_log_probs, linear_jsd, cross_entropy and linear_cross_entropy-jax.
_EAGER, _JIT = "eager PyTorch", "plain JAX"
_LOSS = _Measured(_EAGER, "F.cross_entropy(F.linear(hidden, weight).float(), target)", 12, 17.0, 8, 8.4)
_CROSS_ENTROPY = _Measured(_EAGER, "F.cross_entropy(logits.float(), target)", 12, 16.9, 8, 8.3)
_LOG_PROBS = _Measured(_EAGER, "F.linear(hidden, weight).float().log_softmax(-1).gather(-1, ids)", 12, 15.9, 10, 8.3)
_ENTROPY = _LOG_PROBS._replace(
    expression=f"{_LOG_PROBS.expression}, and the entropy", step_bytes=20, step_ps=42.3, bytes=14, ps=16.4
)
_COMPILED_JSD = _Measured("torch.compile", "the divergence of two float32 softmaxes, compiled", 8, 13.9, 4, 5.7)
_XLA = _Measured(_JIT, "the loss of hidden @ weight.T in 16 bits, under jax.jit", 6, 5.2, 2, 1.5)


def _plain_loss(asked: Asked) -> Plain:
    products = _products(asked)
    if asked.framework == "jax":
        return _XLA.plain(asked, products) if _has_rates(asked) else _XLA.unknown()
    return _LOSS.plain(asked, products, after_peak=_gradient_bytes(asked))


def _plain_log_probs(asked: Asked) -> Plain:
    if asked.framework == "jax":
        return Plain(_JIT, "jax.nn.log_softmax of the logits")
    measured = _ENTROPY if asked.entropy else _LOG_PROBS
    return measured.plain(asked, _products(asked), after_peak=_gradient_bytes(asked))


def _plain_cross_entropy(asked: Asked) -> Plain:
    if asked.framework == "jax":
        return Plain(_JIT, "jax.nn.log_softmax of the logits")
    p = asked.problem
    gradient = DTYPE_BYTES[p.dtype] * p.tokens * p.vocab if asked.gradients else 0
    return _CROSS_ENTROPY.plain(asked, 0, after_peak=gradient)


def _plain_jsd(asked: Asked) -> Plain:
    if asked.framework == "jax":
        return Plain(_JIT, "the divergence of two softmaxes")
    p = asked.problem
    if not _has_rates(asked):
        return _COMPILED_JSD.unknown()
    # A product for each model's logits, and two for the student's gradients.
    products = p.hidden * (3 if asked.gradients else 1) + asked.teacher_hidden
    gradient = DTYPE_BYTES[p.dtype] * p.tokens * p.hidden if asked.gradients else 0
    plain = _COMPILED_JSD.plain(asked, 0, after_peak=gradient)
    assert plain.ms is not None
    return plain._replace(ms=plain.ms + product_ms(asked.gpu, p.tokens * products * p.vocab))


_FP8 = Layer(_fp8_step, _linear_ms)
_GROUPED = Layer(_grouped_step, _grouped_mm_ms)
_COLLECTIVE = Layer(_collective_step, _no_ms)


def _plain_linear(asked: Asked) -> Plain:
    return _FP8.plain(asked, f"nn.Linear in {asked.problem.dtype}", "F.linear(x, weight)")


def _plain_grouped(asked: Asked) -> Plain:
    return _GROUPED.plain(asked, "F.grouped_mm", "F.grouped_mm(x, weight.mT, offs=group_offsets)")


def _plain_collective(asked: Asked) -> Plain:
    return _COLLECTIVE.plain(asked, "one collective", "all_gather and F.linear, or F.linear and reduce_scatter")


# --------------------------------------------------------------------------------------------------------- the table

_TORCH_LOSS = {"triton": Backend(_triton, _triton_way), "torch": Backend(_never, _of_products(memory))}
OPS: dict[str, Op] = {
    "linear_cross_entropy": Op(
        backends={
            ("torch", "full"): _TORCH_LOSS,
            ("torch", "fp8"): {"triton": Backend(_fp8_triton, _fp8_way), "torch": Backend(_never, _fp8_torch_way)},
            ("jax", "full"): {
                "mosaic_gpu": Backend(_mosaic, _mosaic_way),
                "xla": Backend(_never, _of_products(xla_memory)),
            },
        },
        plain=_plain_loss,
        takes=("frozen", "weight_grad_out"),
    ),
    "linear_log_probs": Op(
        backends={
            ("torch", "full"): {
                "triton": Backend(_triton, _triton_way),
                "torch": Backend(_never, _log_probs_of_products(memory.PLANNER, both_walks=True)),
            },
            ("jax", "full"): {"xla": Backend(_never, _log_probs_of_products(xla_memory.PLANNER, both_walks=False))},
        },
        plain=_plain_log_probs,
        takes=("entropy", "frozen"),
        ids=1,
    ),
    "cross_entropy": Op(
        backends={
            ("torch", "full"): {
                "triton": Backend(_triton, partial(_rows_way, triton=True)),
                "torch": Backend(_never, _rows_way),
            },
            ("jax", "full"): {"xla": Backend(_never, partial(_rows_way, xla=True))},
        },
        plain=_plain_cross_entropy,
        needs=("vocab",),
    ),
    "linear_jsd": Op(
        backends={
            ("torch", "full"): {
                "triton": Backend(_triton, _jsd_triton_way),
                "torch": Backend(_never, _jsd_way(jsd_memory.PLANNER)),
            },
            ("jax", "full"): {"xla": Backend(_never, _jsd_way(jsd_memory.JAX_PLANNER))},
        },
        plain=_plain_jsd,
        takes=("teacher_hidden",),
        logits=2,
        softcap=False,
        numbers=0,
    ),
    "fp8_linear": Op(
        backends={
            ("torch", "full"): {
                "scaled_mm": Backend(_fp8_triton, _layers),
                "triton": Backend(_fp8_capable, _layers),
            },
        },
        plain=_plain_linear,
        needs=(),
        takes=("in_features", "out_features"),
        layer=_FP8,
    ),
    "grouped_matmul": Op(
        backends={("torch", "full"): {"triton": Backend(_only_cuda, _layers)}},
        plain=_plain_grouped,
        needs=(),
        takes=("in_features", "out_features", "experts", "rows"),
        layer=_GROUPED,
        source="Times are predicted with rates measured on an H100, for groups of the same size. For another GPU they "
        "are scaled by the data sheets' TFLOP/s and memory bandwidth, which is a guess.",
    ),
    "collective_matmul": Op(
        backends={("torch", x): {"ring": Backend(_never, _layers)} for x in ("full", "fp8")},
        plain=_plain_collective,
        needs=(),
        takes=("in_features", "out_features", "tensor_parallel"),
        layer=_COLLECTIVE,
    ),
}
