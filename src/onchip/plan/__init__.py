"""What an op will cost, from the shapes alone: memory, matrix products and predicted time.  Imports no framework.

`onchip plan` prints what `plan` returns.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from onchip.core.backends import choose_backend
from onchip.core.machine import FRAMEWORKS, choose_framework
from onchip.core.sizes import DTYPE_BYTES, MIB, UNITS
from onchip.frontend.options import (
    require_bool,
    require_int,
    require_one_of,
    require_positive,
    require_positive_int,
    scratch_in_bytes,
)
from onchip.plan.gpus import GPUS, product_ms
from onchip.plan.links import LINKS, Exchange, exchanges, link_rate
from onchip.plan.models import Model, model_of_config, named_model
from onchip.plan.ways import OPS, Asked, Layer, Plain, Way
from onchip.vocab.memory import Problem

__all__ = ["Baseline", "Plan", "Row", "plan"]

PRECISIONS = ("full", "fp8")
_BUDGETS_MIB = (64, 256, 1024, 4096, 16384)
_NO_BOUND = 1 << 62


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the op: in one budget, or of an op without budgets one layer."""

    name: str
    """ "smallest", "default", "fastest", or the budget; of an op without budgets the layer."""
    strategy: str
    """What strategy= it is the plan of."""
    scratch_bytes: int | None
    """What to pass as scratch_bytes; None to leave it out."""
    budget_bytes: int | None
    """The bound on memory, also the default one; None where there is none."""
    fits: bool
    """Whether it runs; if not, the rest is null, but for `needs_bytes`."""
    needs_bytes: int
    """The smallest scratch_bytes that this strategy runs in."""
    memory_bytes: int | None = None
    """Peak memory above inputs, results and returned gradients."""
    memory_parts: dict[str, int] | None = None
    """What it consists of."""
    products: float | None = None
    """Matrix products of tokens x hidden x vocab, those of a pass that runs again in part counted in part."""
    recomputed_tokens: int | None = None
    """Tokens whose logits backward computes a second time."""
    chunk: dict[str, int] | None = None
    """What is worked on at a time."""
    ms: float | None = None
    """Predicted time; None where there is no model of it."""
    sent_bytes: int | None = None
    """Of collective_matmul: what this rank sends to others."""
    plain_ms: float | None = None
    """What the baseline is predicted to take for the layer, of fp8_linear and grouped_matmul."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the op replaces."""

    name: str
    """A word for it."""
    expression: str
    """What it computes."""
    memory_bytes: int | None
    """Peak memory above inputs, results and returned gradients; None where it isn't known."""
    ms: float | None
    """Predicted time; None where there is no model of it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `onchip plan` says, and its --json."""

    verdict: str
    """The plan in a sentence or two."""
    op: str
    """Its name."""
    framework: str
    """ "torch" or "jax"."""
    backend: str
    """The one that the op takes, or that was asked for."""
    precision: str
    """ "full" or "fp8"."""
    device: str
    """ "cuda" or "cpu"."""
    gpu: str | None
    """Whose times are predicted; None on the CPU."""
    model: str | None
    """Its name, where the sizes are a model's."""
    sizes: dict[str, int]
    """The op's own, of one rank, by name."""
    dtype: str
    """The inputs'."""
    weight_dtype: str
    """The weight's."""
    gradients: bool
    """Whether it is of forward and backward, or of forward alone."""
    frozen: bool
    """Whether the weight needs no gradient."""
    weight_grad_out: bool
    """Whether its gradient is added to a tensor of the caller's."""
    tensor_parallel: int
    """Ranks that share the vocabulary, or of collective_matmul the layers."""
    sequence_parallel: bool
    """Whether each of them has the hidden states of its part of the tokens."""
    link: float | None
    """GB/s between two ranks that the exchanges are predicted with; None where there are none."""
    exchanges: list[Exchange]
    """What a rank sends to the others, in the order of the call."""
    logits_bytes: int | None
    """Of the float32 logits, which the op doesn't store."""
    baseline: Baseline
    """What the op replaces."""
    rows: list[Row]
    """Ways to run it; of several of one name the first is what the op takes."""
    notes: list[str]
    """What the numbers leave out, and where the times come from."""

    def row(self, name: str) -> Row:
        """The first row of this name; KeyError where there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)


def plan(
    op: str = "linear_cross_entropy",
    *,
    tokens: int,
    hidden: int | None = None,
    vocab: int | None = None,
    model: str | None = None,
    config: str | Path | None = None,
    teacher_hidden: int | None = None,
    in_features: int | None = None,
    out_features: int | None = None,
    experts: int | None = None,
    rows: int | None = None,
    dtype: str = "bfloat16",
    weight_dtype: str | None = None,
    gradients: bool = True,
    frozen: bool = False,
    weight_grad_out: bool = False,
    entropy: bool = False,
    device: str = "cuda",
    gpu: str | None = None,
    framework: str = "torch",
    backend: str = "auto",
    precision: str = "full",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    link: float | None = None,
    scratch: Sequence[int | float | str] = (),
    every_budget: bool = False,
) -> Plan:
    """What a call of an op will cost: the plan that the op itself will make, and a prediction of its time.

    It looks at no device and at no framework.

    Args:
        op: a loss over a vocabulary, "fp8_linear", "grouped_matmul" or "collective_matmul".
        tokens: all leading dimensions multiplied; of grouped_matmul the rows of the product, each token once for each
            of its experts.
        hidden: the size of a hidden state; `vocab`: entries of the vocabulary.  `model` or `config` knows both; what is
            given besides goes before.
        model: a name on the Hugging Face Hub, in any case, with or without its organisation.
        config: the path of a model's config.json, or of its folder.
        teacher_hidden: of linear_jsd, the teacher's; by default as `hidden`.
        in_features: of fp8_linear, grouped_matmul and collective_matmul, with `out_features`: those of the whole layer.
            A model has those of its blocks, but not of experts.
        experts: of grouped_matmul, how many groups of rows there are.
        rows: of grouped_matmul, how many rows x has where it is read by its argument `rows`.
        dtype: of the inputs: "float32", "bfloat16" or "float16".
        weight_dtype: the weight's, where autocast casts it; by default as `dtype`.
        gradients: of forward and backward with all gradients, or False: of forward alone.
        frozen: of linear_cross_entropy and linear_log_probs, whether the weight needs no gradient.
        weight_grad_out: of linear_cross_entropy in PyTorch, whether backward adds the weight's gradient to a tensor of
            the caller's.
        entropy: of linear_log_probs, whether the entropy is asked for too.
        device: "cuda" or "cpu".
        gpu: whose time to predict: "h100" (the default), "h200", "a100", "l40s", "4090" or "b200".
        framework: "torch" or "jax".
        backend: a backend's name, or "auto": the one that the op takes.
        precision: "full", or of linear_cross_entropy and collective_matmul "fp8".
        tensor_parallel: ranks that share the vocabulary, or of collective_matmul the layers; the plan is of one of
            them.
        sequence_parallel: of a vocabulary: each of them has the hidden states of its part of the tokens, and gathers
            all of them.
        link: of a vocabulary: GB/s that a rank sends to another while it receives as much; by default a guess, 80% of
            the NVLink's or PCIe's in the GPU's data sheet.
        scratch: budgets, as an op's `scratch_bytes` takes them: bytes, a text such as "512MiB", or a float, a part of
            the float32 logits.
        every_budget: rows for many budgets and all strategies.

    Returns:
        A `Plan`.  Its rows are the smallest budget, the default one and the fastest; with `scratch` the default one and
        those.

    Raises:
        TypeError: a size or budget of the wrong type.
        ValueError: an unknown word, a size below 1, sizes that are missing or that the op doesn't have, a model that
            isn't known, a config that can't be read, or a backend that can't run the call.

    >>> made = plan(tokens=16384, hidden=4096, vocab=128256)
    >>> made.row("default").memory_bytes // 2**20
    874
    >>> made.row("fastest").products
    3.0
    """
    require_one_of("plan", "op", op, tuple(OPS))
    known = OPS[op]
    _check_words(op, framework, precision, device, gpu, dtype, weight_dtype)
    of_weight = {"frozen": frozen, "weight_grad_out": weight_grad_out}
    flags = {"gradients": gradients, "entropy": entropy, "every_budget": every_budget, **of_weight}
    for name, flag in {**flags, "sequence_parallel": sequence_parallel}.items():
        require_bool("plan", name, flag)
    if isinstance(scratch, str) or not isinstance(scratch, Sequence):
        raise TypeError(f"plan: scratch must be a list of budgets; got {type(scratch).__name__}")
    of_op = {"teacher_hidden": teacher_hidden, "in_features": in_features, "out_features": out_features}
    of_op |= {"experts": experts, "rows": rows}
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab, "tensor_parallel": tensor_parallel, **of_op}
    for name, size in sizes.items():
        require_positive_int("plan", name, size)
    options = {"entropy": entropy, **of_weight}
    _check_taken(op, {"hidden": hidden, "vocab": vocab, **of_op, **{n: x or None for n, x in options.items()}})
    if frozen and weight_grad_out:
        raise ValueError("plan: a frozen weight has no gradient to add; leave frozen or weight_grad_out out")
    if not gradients and (frozen or weight_grad_out):
        raise ValueError("plan: forward alone has no gradients; leave frozen and weight_grad_out out")
    if weight_grad_out and framework == "jax":
        raise ValueError("plan: in JAX linear_cross_entropy has no weight_grad_out; leave it out")
    found = _found(model, config)
    hidden = hidden or (found.hidden if found else None)
    vocab = vocab or (found.vocab if found else None)
    linears = _linears(known.takes, found, in_features, out_features, experts)
    for name, size in (("hidden", hidden), ("vocab", vocab)):
        if name in known.needs and size is None:
            config_of = f"{config} has no {name} size; " if config is not None else ""
            raise ValueError(f"plan: {config_of}give {' and '.join(known.needs)}, or a model")
    if not linears and tensor_parallel > (vocab or 0):
        raise ValueError(f"plan: tensor_parallel is {tensor_parallel}, but there are {vocab} entries to share")
    if linears and tensor_parallel > 1 and "tensor_parallel" not in known.takes:
        raise ValueError(f"plan: tensor_parallel shares a vocabulary, which {op} has none of; leave it out")
    if (linears or tensor_parallel == 1) and (sequence_parallel or link is not None):
        raise ValueError(
            "plan: sequence_parallel and link are of ranks that share the vocabulary; give tensor_parallel too"
        )
    if sequence_parallel and "hidden" not in known.needs:
        raise ValueError(f"plan: {op} has no hidden states to gather; leave sequence_parallel out")
    if sequence_parallel and tokens % tensor_parallel:
        raise ValueError(f"plan: sequence_parallel needs tokens in {tensor_parallel} equal parts; got {tokens}")
    if link is not None:
        require_positive("plan", "link", link)
    of_rank = -(-(vocab or 0) // tensor_parallel)
    problem = Problem(
        tokens,
        hidden if hidden and "hidden" in known.needs else 0,
        of_rank if "vocab" in known.needs else 0,
        dtype,
        weight_dtype=weight_dtype or dtype,
        device=device,
        op=op,
        softcap=known.softcap and found is not None and found.softcap is not None,
        stats=entropy,
        ids=known.ids,
        grad_weight=not frozen,
        weight_grad_out=weight_grad_out,
    )
    teacher = (teacher_hidden or problem.hidden) if "teacher_hidden" in known.takes else 0
    asked = Asked(
        op, problem, framework, precision, gpu or "h100", gradients, entropy, teacher, linears, experts or 0, rows or 0,
        tensor_parallel,
    )  # fmt: skip
    backends = known.backends[framework, precision]
    chosen = choose_backend(op, backend, {name: made.refusal(asked) for name, made in backends.items()})
    if known.layer is not None:
        if scratch:
            raise ValueError(f"plan: {op} has no scratch_bytes; leave scratch out")
        made = few = [_layer_row(asked, known.layer, name, chosen) for name in linears]
        logits = None
    else:
        logits = tokens * of_rank * known.logits
        budgets = [size for value in scratch if (size := _in_bytes(op, value, logits)) is not None]
        way = backends[chosen].way(asked)
        few = _few_rows(way, budgets)
        made = _many_rows(way, budgets, 4 * logits) if every_budget else few
    sent = []
    if tensor_parallel > 1 and known.numbers and not linears:
        product = product_ms(asked.gpu, tokens * problem.hidden * of_rank)
        size, rate = DTYPE_BYTES[dtype], link_rate(asked.gpu, link)
        numbers = known.numbers + entropy
        sent = exchanges(
            tokens, problem.hidden, size, numbers, tensor_parallel, rate, product,
            gradients=gradients, sequence=sequence_parallel,
        )  # fmt: skip
    plain = known.plain(asked)
    shown = {"tokens": tokens, "hidden": problem.hidden, "vocab": problem.vocab, "teacher_hidden": teacher}
    shown |= {"experts": asked.experts, "rows": asked.rows}
    return Plan(
        verdict=_verdict(asked, plain, few),
        op=op,
        framework=framework,
        backend=chosen,
        precision=precision,
        device=device,
        gpu=(gpu or "h100") if device == "cuda" else None,
        model=found.name if found else None,
        sizes={name: size for name, size in shown.items() if size},
        dtype=dtype,
        weight_dtype=weight_dtype or dtype,
        gradients=gradients,
        frozen=frozen,
        weight_grad_out=weight_grad_out,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        link=link_rate(asked.gpu, link) if sent else None,
        exchanges=sent,
        logits_bytes=None if logits is None else 4 * logits,
        baseline=Baseline(name=plain.name, expression=plain.expression, memory_bytes=plain.memory, ms=plain.ms),
        rows=made,
        notes=_notes(asked, chosen, made, plain, vocab, tensor_parallel, found)
        + _notes_of_exchanges(asked, sent, link, [row for row in few if row.name == "default"]),
    )


# ------------------------------------------------------------------------------------------------------ what is asked


def _check_words(
    op: str, framework: str, precision: str, device: str, gpu: str | None, dtype: str, weight_dtype: str | None
) -> None:
    """Raise for an unknown word, and for words that don't go together."""
    known = OPS[op]
    choose_framework(framework)
    for name, value, allowed in (
        ("precision", precision, PRECISIONS),
        ("device", device, ("cuda", "cpu")),
        ("gpu", gpu or "h100", tuple(GPUS)),
        ("dtype", dtype, tuple(DTYPE_BYTES)),
        ("weight_dtype", weight_dtype or dtype, tuple(DTYPE_BYTES)),
    ):
        require_one_of("plan", name, value, allowed)
    if (framework, precision) not in known.backends:
        there = [FRAMEWORKS[f] + ("" if p == "full" else f" with precision {p!r}") for f, p in known.backends]
        asked = FRAMEWORKS[framework] + ("" if precision == "full" else f" with precision {precision!r}")
        raise ValueError(f"plan: of {op} in {asked} there is no plan; there is one in {', '.join(there)}")
    if device == "cpu" and gpu is not None:
        raise ValueError(f"plan: gpu is {gpu!r}, but device is 'cpu'; leave one of them out")
    if weight_dtype is not None and known.needs == ("vocab",):
        raise ValueError(f"plan: {op} has no weight; leave weight_dtype out")
    if framework == "jax" and weight_dtype not in (None, dtype):
        raise ValueError(
            f"plan: weight_dtype is {weight_dtype!r} and dtype {dtype!r}, but in JAX weight has hidden's dtype; leave "
            "weight_dtype out"
        )


def _check_taken(op: str, given: Mapping[str, Any]) -> None:
    """Raise for a size or an option that the op doesn't have."""
    for name, value in given.items():
        if value is not None and name not in (*OPS[op].needs, *OPS[op].takes):
            of = ", ".join(other for other, entry in OPS.items() if name in (*entry.needs, *entry.takes))
            raise ValueError(f"plan: {op} has no {name}, which is for {of}; leave it out")


def _found(model: str | None, config: str | Path | None) -> Model | None:
    if model is not None and config is not None:
        raise ValueError("plan: give a model or a config, not both")
    if config is not None:
        return model_of_config(Path(config))
    if model is not None and not isinstance(model, str):
        raise TypeError(f"plan: model must be a name; got {type(model).__name__}")
    return None if model is None else named_model(model)


def _linears(
    takes: Sequence[str],
    found: Model | None,
    in_features: int | None,
    out_features: int | None,
    experts: int | None,
) -> dict[str, tuple[int, int]]:
    """Of an op that has them, the linear layers by name."""
    if "in_features" not in takes:
        return {}
    if "experts" in takes and not (in_features and out_features and experts):
        raise ValueError("plan: give in_features, out_features and experts")
    if in_features and out_features:
        names = ("column parallel", "row parallel") if "tensor_parallel" in takes else ("layer",)
        return dict.fromkeys(names, (in_features, out_features))
    if in_features or out_features:
        raise ValueError("plan: give in_features and out_features, both")
    if found is None:
        raise ValueError("plan: give in_features and out_features, or a model")
    if not found.linears():
        raise ValueError(
            f"plan: the layers of {found.name} aren't all of the usual kind; give in_features, out_features"
        )
    return found.linears()


def _in_bytes(op: str, value: float | str, logits: int) -> int | None:
    """A budget as an op's scratch_bytes takes it; None, the default, is a part of less than a byte."""
    budget = scratch_in_bytes(op, value, logits)
    if value is None or budget is not None:
        require_int(op, "scratch_bytes", budget)
        require_positive_int(op, "scratch_bytes", budget)
    return None if budget is None else int(budget)


# --------------------------------------------------------------------------------------------------------------- rows


def _few_rows(way: Way, asked: Sequence[int]) -> list[Row]:
    """The default budget and those that are asked for; or else the smallest, the default one and the fastest."""
    default = _row(way, "default", None)
    if asked:
        return [default, *(_row(way, budget_text(size), size) for size in asked)]
    smallest = _row(way, "smallest", _rounded(min(way.least(strategy) for strategy in way.strategies)))
    largest = _row(way, "fastest" if default.ms is not None else "largest", _NO_BOUND)
    largest = _row(way, largest.name, _rounded(largest.memory_bytes or 0))
    of_default, of_smallest, of_largest = (row.memory_bytes or 0 for row in (default, smallest, largest))
    faster = default.ms is None or (largest.ms is not None and largest.ms < 0.98 * default.ms)
    before = [smallest] if of_smallest < 0.95 * of_default else []
    return [*before, default, *([largest] if faster and of_largest > 1.05 * of_default else [])]


def _many_rows(way: Way, asked: Sequence[int], logits_bytes: int) -> list[Row]:
    """Those of many budgets and all strategies."""
    least = min(way.least(strategy) for strategy in way.strategies)
    sizes = {_rounded(least), *(mib * MIB for mib in _BUDGETS_MIB), _rounded(logits_bytes // 8), *asked}
    budgets = [("default", None), *((budget_text(size), size) for size in sorted(sizes)), ("no bound", _NO_BOUND)]
    return [_row(way, name, size, strategy) for name, size in budgets for strategy in _chosen_first(way, size)]


def _chosen_first(way: Way, budget: int | None) -> list[str]:
    """All strategies, that one first which the op takes in this budget."""
    try:
        chosen = way.chosen(budget)
    except ValueError:
        return list(way.strategies)
    return [chosen, *(strategy for strategy in way.strategies if strategy != chosen)]


def _row(way: Way, name: str, budget: int | None, strategy: str | None = None) -> Row:
    """The plan in a budget; by default of the strategy that the op takes."""
    shown = None if budget == _NO_BOUND else budget
    try:
        strategy = strategy or way.chosen(budget)
        step = way.step(strategy, budget)
    except ValueError:
        strategy = strategy or min(way.strategies, key=way.least)
        least = way.least(strategy)
        return Row(name=name, strategy=strategy, scratch_bytes=shown, budget_bytes=shown, fits=False, needs_bytes=least)
    return Row(
        name=name,
        strategy=strategy,
        scratch_bytes=shown,
        budget_bytes=way.default(strategy) if budget is None else shown,
        fits=True,
        needs_bytes=way.least(strategy),
        memory_bytes=sum(step.memory_parts.values()),
        memory_parts=step.memory_parts,
        products=step.products,
        recomputed_tokens=step.recomputed,
        chunk=step.chunk,
        ms=step.ms,
    )


def _layer_row(asked: Asked, layer: Layer, name: str, backend: str) -> Row:
    step = layer.step(asked, name, backend)
    size = sum(step.memory_parts.values())
    return Row(
        name=name,
        strategy="auto",
        scratch_bytes=None,
        budget_bytes=None,
        fits=True,
        needs_bytes=size,
        memory_bytes=size,
        memory_parts=step.memory_parts,
        products=step.products,
        recomputed_tokens=step.recomputed,
        chunk=step.chunk,
        ms=step.ms,
        sent_bytes=step.sent,
        plain_ms=layer.plain_ms(asked, asked.linears[name]),
    )


def _rounded(size: int) -> int:
    """A budget that people can read: up to a MiB, from 128 MiB on to 16, from a GiB on to a quarter of one."""
    unit = UNITS["GiB"] // 4 if size >= UNITS["GiB"] else 16 * MIB if size >= 128 * MIB else MIB
    return -(-size // unit) * unit


def budget_text(size: int) -> str:
    """A budget as scratch_bytes takes it, to two digits after the point below 1000."""
    if size < UNITS["KiB"]:
        return str(size)
    exact = [unit for unit in ("GiB", "MiB") if size >= UNITS[unit] and 100 * size % UNITS[unit] == 0]
    largest = next(unit for unit in ("GiB", "MiB", "KiB") if size >= UNITS[unit])
    unit = next(iter(exact), largest)
    number = 100 * size // UNITS[unit] / 100
    return f"{number:{'.0f' if number >= 1000 else 'g'}}{unit}"


# -------------------------------------------------------------------------------------------------------------- words


def memory_text(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    if size >= UNITS["GiB"]:
        parts = 10 if size >= 10 * UNITS["GiB"] else 100
        return f"{-(-parts * size // UNITS['GiB']) / parts:g} GiB"
    return f"{-(-size // MIB)} MiB" if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f} MiB"


def time_text(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:.0f} ms"


def _needs(size: int | None, ms: float | None) -> str:
    said = [memory_text(size)] if size is not None else []
    return " and ".join([*said, *([time_text(ms)] if ms is not None else [])])


def _verdict(asked: Asked, plain: Plain, rows: Sequence[Row]) -> str:
    if asked.linears:
        return _verdict_of_layers(asked, plain, rows)
    default = next(row for row in rows if row.name == "default")
    name = plain.name if "." in plain.name else plain.name[0].upper() + plain.name[1:]
    if needs := _needs(plain.memory, plain.ms):
        said = f"{name} needs {needs}; onchip by default {_needs(default.memory_bytes, default.ms)}."
    else:
        said = f"By default onchip needs {_needs(default.memory_bytes, default.ms)}."
    last = rows[-1]
    if any(row.name not in ("smallest", "default", "fastest", "largest") for row in rows):
        fitting = [f"With {row.name}: {_needs(row.memory_bytes, row.ms)}." for row in rows[1:] if row.fits]
        small = [f"{row.name} is too small." for row in rows[1:] if not row.fits]
        return " ".join([said, *fitting, *small])
    if default.ms is None:
        return said
    if last.name != "fastest" or last.ms is None or last.scratch_bytes is None:
        return f"{said} More memory makes it no faster."
    faster = 100 * (default.ms / last.ms - 1)
    budget = budget_text(last.scratch_bytes)
    return f'{said} For {faster:.0f}% more speed give it {memory_text(last.scratch_bytes)}: scratch_bytes="{budget}".'


def _verdict_of_layers(asked: Asked, plain: Plain, rows: Sequence[Row]) -> str:
    times = [row.ms for row in rows if row.ms is not None]
    layers = "the layer" if len(rows) == 1 else "the linear layers of a block"
    kept = sum(size for row in rows for name, size in (row.memory_parts or {}).items() if name.startswith("kept"))
    keeps = f"keeps {memory_text(kept)} until backward" if kept else ""
    if all(row.sent_bytes is not None for row in rows):
        sent = sum(row.sent_bytes or 0 for row in rows)
        return f"For these layers each rank sends {memory_text(sent)}, under the products of {asked.ranks} blocks each."
    if plain.ms is None or len(times) < len(rows):
        return f"For {layers}, {asked.op} {keeps or 'keeps nothing'}."
    faster = 100 * (plain.ms / sum(times) - 1)
    said = f"For {layers}, {plain.name} needs {time_text(plain.ms)}; {asked.op} {time_text(sum(times))}, "
    said += f"{faster:.0f}% more speed" if faster >= 0 else f"{-faster:.0f}% less speed"
    return f"{said}, and {keeps}." if keeps else f"{said}."


def _notes(
    asked: Asked,
    backend: str,
    rows: Sequence[Row],
    plain: Plain,
    vocab: int | None,
    tensor_parallel: int,
    found: Model | None,
) -> list[str]:
    notes = []
    if any(row.ms is not None for row in rows) or plain.ms is not None:
        notes.append(OPS[asked.op].source or GPUS[asked.gpu].source)
    if all(row.ms is None for row in rows):
        p = asked.problem
        what = (
            "on the CPU"
            if p.device == "cpu"
            else "for float32 products"
            if p.dtype == "float32"
            else f"for backend {backend}"
        )
        notes.append(f"onchip's time is not predicted {what}.")
    if asked.problem.device == "cuda" and asked.gpu != "h100" and not asked.linears:
        notes.append("Memory and products are the same on every GPU.")
    if asked.ranks > 1 and asked.linears:
        notes.append(f"This is one of {asked.ranks} ranks. Sums travel in float32.")
    elif tensor_parallel > 1:
        notes.append(
            f"This is one of {tensor_parallel} ranks, with {asked.problem.vocab} of the {vocab} entries of the "
            "vocabulary. Times and memory are without what ranks exchange"
            + ("." if OPS[asked.op].numbers else ", which is not modelled.")
        )
    if asked.rows:
        notes.append("The times leave out what it takes to read x by rows and to sum up its gradient.")
    if asked.precision == "fp8" or asked.op == "fp8_linear":
        notes.append("FP8 products are an approximation.")
    if found is not None and found.tied and asked.problem.hidden:
        notes.append("The model's head shares its weight with the embedding.")
    if found is not None and found.softcap is not None and not asked.linears and not asked.problem.softcap:
        notes.append(f"The model caps its logits, and {asked.op} has no softcap.")
    if asked.problem.softcap and found is not None and found.softcap is not None:
        notes.append(
            f"The model caps its logits: pass softcap={found.softcap:g}. What {plain.name} takes is without the cap."
        )
    return notes


def _notes_of_exchanges(asked: Asked, sent: Sequence[Exchange], link: float | None, rows: Sequence[Row]) -> list[str]:
    if not sent:
        return []
    exposed, rate = sum(x.exposed_ms for x in sent), link_rate(asked.gpu, link)
    name, nominal = LINKS[asked.gpu]
    source = "as given" if link is not None else f"80% of the data sheet's {nominal:g} for {name}: nothing was measured"
    said = f"Ranks exchange {memory_text(sum(x.bytes for x in sent))} each at {rate:g} GB/s ({source})"
    of = sum(row.ms for row in rows if row.ms is not None)
    part = f", {100 * exposed / (exposed + of):.0f}% of the call by default" if of else ""
    return [f"{said}. {time_text(exposed)} of it are beside the computation{part}."]
