"""Predicts from the shapes alone what an op will cost: memory, matrix products, and time where it was measured.

`onchip plan` prints what `plan` returns.  This package imports no framework.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onchip.core.backends import choose_backend
from onchip.core.machine import FRAMEWORKS, choose_framework
from onchip.core.sizes import DTYPE_BYTES
from onchip.frontend.options import require_bool, require_one_of, require_positive, require_positive_int
from onchip.plan.asked import PlannedCall, PlannedOp, planned_op
from onchip.plan.document import Baseline, Plan, Row
from onchip.plan.gpus import GPUS, product_ms
from onchip.plan.links import Exchange, exchanges
from onchip.plan.models import ModelSizes, model_of_config, named_model
from onchip.plan.rows import few_rows, in_bytes, layer_row, many_rows
from onchip.plan.words import note_of_exchanges, notes, verdict
from onchip.registry import OPS
from onchip.vocab.memory import Problem

_HEADS = ("heads", "key_heads", "head_size", "value_size")

__all__ = ["Baseline", "Plan", "Row", "plan"]

PRECISIONS = ("full", "fp8")


def plan(
    op: str = "linear_cross_entropy",
    *,
    tokens: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    model: str | None = None,
    config: str | Path | None = None,
    hidden: int | None = None,
    vocab: int | None = None,
    teacher_hidden: int | None = None,
    in_features: int | None = None,
    out_features: int | None = None,
    experts: int | None = None,
    rows: int | None = None,
    heads: int | None = None,
    key_heads: int | None = None,
    head_size: int | None = None,
    value_size: int | None = None,
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
    """Predict what a call of an op will cost: the plan that the op itself will make, and the time that it will take.

    It needs no device and no framework.

    Args:
        op: the op's name, one of those that `onchip plan --help` lists.
        tokens: how many tokens there are, counting all sequences.
        batch: how many sequences there are; give it with `sequence` instead of `tokens`.
        sequence: how many tokens a sequence has; without `batch` there is one sequence.
        model: a model's name on the Hugging Face Hub, in any case, with or without its organisation.
        config: the path of a model's config.json, or of the folder that holds it.
        hidden: the hidden size, if not the model's.
        vocab: the size of the vocabulary, if not the model's.
        teacher_hidden: the teacher's hidden size; by default the student's.
        in_features: the layer's input features, before ranks share it; give it with `out_features` or give a model.
        out_features: the layer's output features.
        experts: the number of experts, if not the model's.  `tokens` then counts each token once for each of its
            experts; with a model it counts each token once.
        rows: how many rows x has, where the product reads them by an index.
        heads: the number of query heads, if not the model's; give it with `key_heads` and `head_size`.
        key_heads: the number of heads for keys and values.
        head_size: the size of a head.
        value_size: the size of a head of values; by default `head_size`.
        dtype: the inputs' dtype: "float32", "bfloat16" or "float16".
        weight_dtype: the weight's dtype, where autocast casts it; by default `dtype`.
        gradients: whether to plan forward and backward; False plans the forward pass only.
        frozen: plan for a weight that needs no gradient.
        weight_grad_out: plan for a backward pass that adds the weight's gradient to a tensor of yours (PyTorch only).
        entropy: plan for the entropy too.
        device: the device to plan for, "cuda" or "cpu"; this machine need not have it.
        gpu: the GPU to plan for: "h100" (the default), "h200", "a100", "l40s", "4090" or "b200".  Times are predicted
            for the first two only.
        framework: the framework to plan for, "torch" or "jax"; it need not be installed.
        backend: the backend to plan for; "auto" is the one that the op would choose.
        precision: the products' precision: "full", or "fp8" where the op has it.
        tensor_parallel: how many ranks share the vocabulary or the layers; the plan is for one of them.
        sequence_parallel: plan for ranks that each hold the hidden states of a part of the tokens and gather the rest.
        link: the rate in GB/s at which a rank sends to another while it receives as much; without it, the plan tells
            how many bytes ranks exchange, but not how long that takes.
        scratch: budgets to compare, as `scratch_bytes` takes them: bytes, a text such as "512MiB", or a float, which is
            a fraction of the float32 logits.
        every_budget: show many budgets and all strategies.

    Returns:
        A `Plan`.  Its rows are the smallest budget, the default one and the fastest; with `scratch`, they are the
        default one and those given.

    Raises:
        TypeError: a size or budget has the wrong type.
        ValueError: a word or a model is unknown, a size is below 1 or missing, the op doesn't have a size or an option,
            the config can't be read, or the backend can't run the call.

    >>> made = plan(tokens=16384, hidden=4096, vocab=128256)
    >>> made.row("default").memory_bytes // 2**20
    874
    >>> made.row("fastest").products
    3.0
    """
    given = dict(locals())
    require_one_of("plan", "op", op, tuple(OPS))
    known = planned_op(op)
    _check_words(known, given)
    for name in ("gradients", "entropy", "every_budget", "frozen", "weight_grad_out", "sequence_parallel"):
        require_bool("plan", name, given[name])
    if isinstance(scratch, str) or not isinstance(scratch, Sequence):
        raise TypeError(f"plan: scratch must be a list of budgets; got {type(scratch).__name__}")
    of_some = ("hidden", "vocab", "teacher_hidden", "in_features", "out_features", "experts", "rows", *_HEADS)
    for name in ("tokens", "batch", "sequence", "tensor_parallel", *of_some):
        require_positive_int("plan", name, given[name])
    for name in (*of_some, "entropy", "frozen", "weight_grad_out"):
        having = [other for other in OPS if name in (*planned_op(other).needs, *planned_op(other).takes)]
        if given[name] and op not in having:
            raise ValueError(f"plan: {op} has no {name}, which is for {', '.join(having)}; leave it out")
    _refuse(
        {
            "a frozen weight has no gradient to add; leave frozen or weight_grad_out out": frozen and weight_grad_out,
            "forward alone has no gradients; leave frozen and weight_grad_out out": not gradients
            and (frozen or weight_grad_out),
            f"in JAX {op} has no weight_grad_out; leave it out": weight_grad_out and framework == "jax",
        }
    )
    _refuse(
        {
            "give tokens, or batch and sequence": not tokens and not sequence,
            "give tokens, or batch and sequence, not both": bool(tokens and (batch or sequence)),
        }
    )
    found = _found(model, config)
    hidden = hidden or (found.hidden if found else None)
    vocab = vocab or (found.vocab if found else None)
    linears = _linears(known.takes, found, in_features, out_features, experts)
    tokens, choices = tokens or (batch or 1) * (sequence or 0), 1
    if "experts" in known.takes and not in_features and found and found.experts:
        experts, choices = experts or found.experts, found.expert_choices or 1
        tokens *= choices
    if "heads" in known.needs and found and not (heads or key_heads or head_size):
        heads, key_heads, head_size = found.heads, found.key_heads, found.head_size
        value_size = value_size or found.value_size
    for name, size in (("hidden", hidden), ("vocab", vocab)):
        if name in known.needs and size is None:
            config_of = f"{config} has no {name} size; " if config is not None else ""
            raise ValueError(f"plan: {config_of}give {' and '.join(known.needs)}, or model")
    if "heads" in known.needs and not (heads and key_heads and head_size):
        without = f"the heads of {found.name} aren't of the usual kind; " if found and not heads else ""
        more = ", and value_size, if it is another" if without else ", or model"
        raise ValueError(f"plan: {without}give {', '.join(known.needs)}{more}")
    _check_ranks(known, given, vocab or 0)
    of_rank = -(-(vocab or 0) // tensor_parallel)
    weight_dtype = weight_dtype or dtype
    problem = Problem(
        tokens,
        hidden if hidden and "hidden" in known.needs else 0,
        of_rank if "vocab" in known.needs else 0,
        dtype,
        weight_dtype=weight_dtype,
        device=device,
        op=op,
        softcap=known.softcap and found is not None and found.softcap is not None,
        stats=entropy,
        ids=known.ids,
        grad_weight=not frozen,
        weight_grad_out=weight_grad_out,
    )
    teacher = (teacher_hidden or problem.hidden) if "teacher_hidden" in known.takes else 0
    asked = PlannedCall(
        op, problem, framework, precision, gpu or "h100", gradients, entropy, teacher, linears, experts or 0, rows or 0,
        tensor_parallel, batch or 1, heads or 0, key_heads or 0, head_size or 0, value_size or 0,
    )  # fmt: skip
    backends = known.backends[framework, precision]
    chosen = choose_backend(op, backend, {name: made.refusal(asked) for name, made in backends.items()})
    logits = None
    if known.layer is not None:
        if scratch:
            raise ValueError(f"plan: {op} has no scratch_bytes; leave scratch out")
        made = few = [layer_row(asked, known.layer, name, chosen) for name in linears]
    else:
        logits = tokens * of_rank * known.logits
        budgets = [size for value in scratch if (size := in_bytes(op, value, logits)) is not None]
        make = backends[chosen].way
        assert make is not None
        way = make(asked)
        few = few_rows(way, budgets)
        made = many_rows(way, budgets, 4 * logits) if every_budget else few
    sent: list[Exchange] = []
    plain, compiled = known.plain(asked), known.compiled(asked)
    said = notes(asked, chosen, made, plain, vocab, tensor_parallel, found)
    if tensor_parallel > 1 and known.numbers and not linears:
        product = product_ms(tokens * problem.hidden * of_rank) if asked.measured else None
        sent = exchanges(
            tokens, problem.hidden, DTYPE_BYTES[dtype], known.numbers + entropy, tensor_parallel, link, product,
            gradients=gradients, sequence=sequence_parallel, rounded=chosen == "triton" and precision == "full",
        )  # fmt: skip
        said.append(note_of_exchanges(sent, link, next(row.ms for row in few if row.name == "default")))
    if choices > 1:
        said.append(f"Each of the {tokens // choices} tokens goes to {choices} experts: {tokens} rows.")
    shown = {
        "tokens": tokens,
        "batch": batch if sequence else None,
        "sequence": sequence,
        "hidden": problem.hidden,
        "vocab": problem.vocab,
        "teacher_hidden": teacher,
    }
    shown |= {"experts": asked.experts, "rows": asked.rows}
    shown |= {name: getattr(asked, name) for name in _HEADS}
    made_of = {
        "verdict": verdict(asked, plain, compiled, few),
        "backend": chosen,
        "gpu": asked.gpu if device == "cuda" else None,
        "model": found.name if found else None,
        "sizes": {name: size for name, size in shown.items() if size},
        "weight_dtype": weight_dtype,
        "link": link if sent else None,
        "exchanges": sent,
        "logits_bytes": None if logits is None else 4 * logits,
        "baseline": plain,
        "compiled": compiled,
        "rows": made,
        "notes": said,
    }
    return Plan(**{name: x for name, x in given.items() if name in Plan.__struct_fields__} | made_of)


# ------------------------------------------------------------------------------------------------------ what is asked


def _check_words(known: PlannedOp, given: Mapping[str, Any]) -> None:
    """Raise for an unknown word, and for words that don't go together."""
    framework, precision, gpu, dtype = (given[name] for name in ("framework", "precision", "gpu", "dtype"))
    choose_framework(framework)
    dtypes = tuple(DTYPE_BYTES)
    allowed = {"precision": PRECISIONS, "device": ("cuda", "cpu"), "gpu": tuple(GPUS)}
    for name, words in {**allowed, "dtype": dtypes, "weight_dtype": dtypes}.items():
        if given[name] is not None or name in ("precision", "device", "dtype"):
            require_one_of("plan", name, given[name], words)

    def named(framework: str, precision: str) -> str:
        return FRAMEWORKS[framework] + ("" if precision == "full" else f" with precision {precision!r}")

    if (framework, precision) not in known.backends:
        there = ", ".join(named(*one) for one in known.backends)
        asked = named(framework, precision)
        raise ValueError(f"plan: there is no plan for {given['op']} in {asked}; there is one for {there}")
    of_weight = given["weight_dtype"]
    _refuse(
        {
            f"gpu is {gpu!r}, but device is 'cpu'; leave one of them out": given["device"] == "cpu" and gpu is not None,
            f"{given['op']} has no weight; leave weight_dtype out": of_weight is not None and known.needs == ("vocab",),
            f"weight_dtype is {of_weight!r} and dtype {dtype!r}, but in JAX weight has hidden's dtype; leave "
            "weight_dtype out": framework == "jax" and of_weight not in (None, dtype),
        }
    )


def _refuse(reasons: Mapping[str, bool]) -> None:
    """Raise ValueError with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"plan: {reason}")


def _check_ranks(known: PlannedOp, given: Mapping[str, Any], vocab: int) -> None:
    """Raise where ranks can't share what the op has."""
    op, tokens, ranks, sequence, link = (
        given[name] for name in ("op", "tokens", "tensor_parallel", "sequence_parallel", "link")
    )
    shares = "vocab" in known.needs
    _refuse(
        {
            f"tensor_parallel is {ranks}, but there are {vocab} entries to share": shares and ranks > vocab,
            f"tensor_parallel shares a vocabulary, which {op} doesn't have; leave it out": not shares
            and ranks > 1
            and "tensor_parallel" not in known.takes,
            "sequence_parallel and link are for ranks that share a vocabulary; leave them out or give "
            "tensor_parallel": (not shares or ranks == 1) and (sequence or link is not None),
            f"{op} has no hidden states to gather; leave sequence_parallel out": sequence
            and "hidden" not in known.needs,
            f"tokens must be a multiple of {ranks}, a part for each rank; got {tokens}": sequence
            and tokens % ranks > 0,
        }
    )
    if link is not None:
        require_positive("plan", "link", link)


def _found(model: str | None, config: str | Path | None) -> ModelSizes | None:
    if model is not None and config is not None:
        raise ValueError("plan: give model or config, not both")
    if config is not None:
        return model_of_config(Path(config))
    if model is not None and not isinstance(model, str):
        raise TypeError(f"plan: model must be a name; got {type(model).__name__}")
    return None if model is None else named_model(model)


def _linears(
    takes: Sequence[str],
    found: ModelSizes | None,
    in_features: int | None,
    out_features: int | None,
    experts: int | None,
) -> dict[str, tuple[int, int]]:
    """The linear layers by name, for an op that has them."""
    if "in_features" not in takes:
        return {}
    if "experts" in takes and not (in_features and out_features and experts):
        if in_features or out_features or found is None:
            raise ValueError("plan: give in_features, out_features and experts, or model")
        if not found.expert_linears():
            raise ValueError(f"plan: {found.name} is no mixture of experts; give in_features, out_features and experts")
        return found.expert_linears()
    if in_features and out_features:
        names = ("column parallel", "row parallel") if "tensor_parallel" in takes else ("layer",)
        return dict.fromkeys(names, (in_features, out_features))
    if in_features or out_features:
        raise ValueError("plan: give in_features and out_features, both")
    if found is None:
        raise ValueError("plan: give in_features and out_features, or model")
    if not found.linears():
        raise ValueError(
            f"plan: the layers of {found.name} aren't all of the usual kind; give in_features and out_features"
        )
    return found.linears()
