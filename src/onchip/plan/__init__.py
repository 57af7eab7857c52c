"""What an op will cost, from the shapes alone: memory, matrix products, and time where it was measured.  No framework.

`onchip plan` prints what `plan` returns.
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

_HEADS = ("heads", "key_heads", "head_size")

__all__ = ["Baseline", "Plan", "Row", "plan"]

PRECISIONS = ("full", "fp8")


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
    heads: int | None = None,
    key_heads: int | None = None,
    head_size: int | None = None,
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
        op: its name, of those that `onchip plan --help` lists.  A size or an option that only some ops have raises for
            the others, and names those that have it.
        tokens: all leading dimensions multiplied; of a product with `experts` its rows, each token once for each of
            its experts.
        hidden: the size of a hidden state; it goes before a model's.
        vocab: entries of the vocabulary; likewise.
        model: a name on the Hugging Face Hub, in any case, with or without its organisation.
        config: the path of a model's config.json, or of its folder.
        teacher_hidden: the teacher's; by default as `hidden`.
        in_features: with `out_features`: those of the whole layer.  A model has those of its blocks, but not of
            experts.
        out_features: of the same.
        experts: how many groups of rows there are.
        rows: how many rows x has where it is read by its argument `rows`.
        heads: with `key_heads` and `head_size`: those of queries; `tokens` are then those of one sequence, queries and
            keys.
        key_heads: those of keys and values.
        head_size: of each head.
        dtype: of the inputs: "float32", "bfloat16" or "float16".
        weight_dtype: the weight's, where autocast casts it; by default as `dtype`.
        gradients: of forward and backward with all gradients, or False: of forward alone.
        frozen: whether the weight needs no gradient.
        weight_grad_out: of linear_cross_entropy in PyTorch, whether backward adds the weight's gradient to a tensor of
            the caller's.
        entropy: whether the entropy is asked for too.
        device: "cuda" or "cpu"; what to plan for, not what is here.
        gpu: "h100" (the default), "h200", "a100", "l40s", "4090" or "b200".  Times are predicted for the first two,
            where they were measured.
        framework: "torch" or "jax"; what to plan for, not what is here.
        backend: a backend's name, or "auto": the one that the op takes.
        precision: "full", or of linear_cross_entropy and collective_matmul "fp8".
        tensor_parallel: ranks that share the vocabulary, or of collective_matmul the layers; the plan is of one of
            them.
        sequence_parallel: of a vocabulary: each of them has the hidden states of its part of the tokens, and gathers
            all of them.
        link: of a vocabulary: GB/s that a rank sends to another while it receives as much; without it what ranks
            exchange is told in bytes alone.
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
    given = dict(locals())
    require_one_of("plan", "op", op, tuple(OPS))
    known = planned_op(op)
    _check_words(known, given)
    for name in ("gradients", "entropy", "every_budget", "frozen", "weight_grad_out", "sequence_parallel"):
        require_bool("plan", name, given[name])
    if isinstance(scratch, str) or not isinstance(scratch, Sequence):
        raise TypeError(f"plan: scratch must be a list of budgets; got {type(scratch).__name__}")
    of_some = ("hidden", "vocab", "teacher_hidden", "in_features", "out_features", "experts", "rows", *_HEADS)
    for name in ("tokens", "tensor_parallel", *of_some):
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
    found = _found(model, config)
    hidden = hidden or (found.hidden if found else None)
    vocab = vocab or (found.vocab if found else None)
    linears = _linears(known.takes, found, in_features, out_features, experts)
    for name, size in (("hidden", hidden), ("vocab", vocab)):
        if name in known.needs and size is None:
            config_of = f"{config} has no {name} size; " if config is not None else ""
            raise ValueError(f"plan: {config_of}give {' and '.join(known.needs)}, or a model")
    if "heads" in known.needs and not (heads and key_heads and head_size):
        raise ValueError(f"plan: give {', '.join(known.needs)}")
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
        tensor_parallel, heads or 0, key_heads or 0, head_size or 0,
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
        few = few_rows(make(asked), budgets)
        made = many_rows(make(asked), budgets, 4 * logits) if every_budget else few
    sent: list[Exchange] = []
    plain = known.plain(asked)
    said = notes(asked, chosen, made, plain, vocab, tensor_parallel, found)
    if tensor_parallel > 1 and known.numbers and not linears:
        product = product_ms(tokens * problem.hidden * of_rank) if asked.measured else None
        sent = exchanges(
            tokens, problem.hidden, DTYPE_BYTES[dtype], known.numbers + entropy, tensor_parallel, link, product,
            gradients=gradients, sequence=sequence_parallel,
        )  # fmt: skip
        said.append(note_of_exchanges(sent, link, next(row.ms for row in few if row.name == "default")))
    shown = {"tokens": tokens, "hidden": problem.hidden, "vocab": problem.vocab, "teacher_hidden": teacher}
    shown |= {"experts": asked.experts, "rows": asked.rows}
    shown |= {name: getattr(asked, name) for name in _HEADS}
    made_of = {
        "verdict": verdict(asked, plain, few),
        "backend": chosen,
        "gpu": asked.gpu if device == "cuda" else None,
        "model": found.name if found else None,
        "sizes": {name: size for name, size in shown.items() if size},
        "weight_dtype": weight_dtype,
        "link": link if sent else None,
        "exchanges": sent,
        "logits_bytes": None if logits is None else 4 * logits,
        "baseline": plain,
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
        raise ValueError(f"plan: of {given['op']} in {asked} there is no plan; there is one in {there}")
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
            f"tensor_parallel shares a vocabulary, which {op} has none of; leave it out": not shares
            and ranks > 1
            and "tensor_parallel" not in known.takes,
            "sequence_parallel and link are of ranks that share the vocabulary; give tensor_parallel too": (
                not shares or ranks == 1
            )
            and (sequence or link is not None),
            f"{op} has no hidden states to gather; leave sequence_parallel out": sequence
            and "hidden" not in known.needs,
            f"sequence_parallel needs tokens in {ranks} equal parts; got {tokens}": sequence and tokens % ranks > 0,
        }
    )
    if link is not None:
        require_positive("plan", "link", link)


def _found(model: str | None, config: str | Path | None) -> ModelSizes | None:
    if model is not None and config is not None:
        raise ValueError("plan: give a model or a config, not both")
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
