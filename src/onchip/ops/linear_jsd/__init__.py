r"""Generalised Jensen-Shannon divergence between a student's and a teacher's next-token distributions.

With z the student's and u the teacher's logits (hidden @ weight.T + bias, or given), both divided by `temperature`,
s = softmax(z), t = softmax(u), m = (1 - b) s + b t, the loss of a token is

    L = (1 - b) KL(s || m) + b KL(t || m)                    0 < b < 1
    L = KL(t || s)   (forward KL)                            b = 0
    L = KL(s || t)   (reverse KL)                            b = 1

The ends are special cases, not limits: with b JSD_b goes to 0, and JSD_b / b to KL(t || s).  The gradients are

    dL/dz = (1 - b) s (log(s / m) - KL(s || m))              dL/du = b t (log(t / m) - KL(t || m))
    dL/dz = s - t                                            dL/du = t (log(t / s) - KL(t || s))            b = 0
    dL/dz = s (log(s / t) - KL(s || t))                      dL/du = t - s                                  b = 1

divided by `temperature`.  Note that (1 - b)(s - m) isn't the first of them: it is the gradient of b (1 - b) KL(t || s).

With d = log t - log s and x = log1p(c expm1(-|d|)), where c is b for d <= 0 and 1 - b for d > 0, the computation uses
log(m / s) = x + max(d, 0) and log(m / t) = x - min(d, 0).  Nothing overflows, and d = 0 gives exact zeros.  The loss is
the sum of -(1 - b) s log(m / s) - b t log(m / t), at the ends of t d - t + s and its mirror image.  Each of these terms
is 0 or more, and an error in a log-sum-exp enters their sum only in second order.

Sources: GKD (arXiv:2306.13649), for generalised JSD in distillation; Hinton et al. (arXiv:1503.02531), for the
temperature and its square; Liger Kernel (arXiv:2410.10989), for chunks of tokens whose gradients are computed in
forward.

The computation is in `onchip.vocab`; docs/architecture.md shows what lives where.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from onchip.frontend.options import check_head, check_options, require_one_of, scratch_in_bytes
from onchip.frontend.topk import TopK
from onchip.frontend.warm_up import Make, Sizes, WarmUpCall

OP = "linear_jsd"
LOGITS_OP = "jsd"
KINDS = ("log_probs", "logits")
RESTS = ("tail", "truncated", "renormalised")

Shape = tuple[int, ...]


# ---------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class JsdOptions:
    """The options that are plain numbers, words and flags; making it checks them."""

    op: str = OP
    beta: float = 0.5
    temperature: float = 1.0
    temperature_squared: bool = False
    ignore_index: int = -100
    reduction: str = "mean"
    hard_weight: float = 0.0
    vocab: int | None = None
    teacher_grad: bool = False
    check_inputs: bool = False
    scratch_bytes: int | None = None

    def __post_init__(self) -> None:
        check_options(self.op, self, op=(OP, LOGITS_OP))

    @staticmethod
    def of(op: str, given: Mapping[str, Any], scratch_bytes: int | None = None) -> "JsdOptions":
        """The options among the arguments of a public function, except scratch_bytes."""
        return JsdOptions(op, **{name: given[name] for name in _OPTIONS if name in given}, scratch_bytes=scratch_bytes)

    def with_scratch(self, given: Mapping[str, Any], logits: int) -> "JsdOptions":
        """The same with the scratch_bytes of the arguments, for models with this many logits each."""
        number = logits * (2 if given["teacher_topk"] is None else 1)
        scratch_bytes = scratch_in_bytes(self.op, given["scratch_bytes"], number)
        return self if scratch_bytes is None else JsdOptions.of(self.op, given, scratch_bytes)

    @property
    def soft_factor(self) -> float:
        """The factor of the divergence in the loss."""
        return (1 - self.hard_weight) * (self.temperature**2 if self.temperature_squared else 1.0)


_OPTIONS = tuple(f.name for f in fields(JsdOptions)[1:] if f.name != "scratch_bytes")


# ------------------------------------------------------------------------------------------------ what fits together

PARTS = ("hidden", "weight", "bias", "logits")
"""The arguments that give a model, such as `student_hidden`: its last layer or its logits."""
_REQUIRED = {OP: ("student_hidden", "student_weight"), LOGITS_OP: ("student_logits",)}
_ROWS = ("teacher_hidden", "teacher_logits", "teacher_topk.indices", "teacher_topk.values")
"""The arguments that have a row of numbers for each token."""


def named_arrays(op: str, given: Mapping[str, Any], labels: str) -> dict[str, Any]:
    """The arrays that are given or must be, by the names that errors give them; raise for a wrong top-k.

    `given` are the arguments of a public function, `labels` is the front end's word for targets.
    """
    names = (*(f"{who}_{part}" for who in ("student", "teacher") for part in PARTS), labels, "token_weight")
    named = {name: given.get(name) for name in names if given.get(name) is not None or name in _REQUIRED[op]}
    topk = given["teacher_topk"]
    if topk is None:
        return named
    if not isinstance(topk, TopK):
        raise TypeError(f"{op}: teacher_topk must be a TopK(indices, values, kind, rest); got {type(topk).__name__}")
    require_one_of(op, "teacher_topk.kind", topk.kind, KINDS)
    require_one_of(op, "teacher_topk.rest", topk.rest, RESTS)
    if topk.kind == "logits" and topk.rest != "renormalised":
        raise ValueError(
            f"{op}: teacher_topk.rest={topk.rest!r} needs the teacher's probabilities: pass kind='log_probs', "
            "or rest='renormalised', which needs no normaliser"
        )
    return {**named, "teacher_topk.indices": topk.indices, "teacher_topk.values": topk.values}


def check_shapes(
    options: JsdOptions, shapes: Mapping[str, Shape], labels: str, *, split: bool = False
) -> tuple[Shape, int]:
    """Raise ValueError for what doesn't fit together; return the tokens' shape and the entries that count.

    `shapes` are those of the arguments that are given, weights as [V, H]; `labels` is the front end's word for targets.
    `split`: devices have parts of the vocabulary, and both models' are of one size.
    """
    op = options.op
    _check_sources(options, shapes, labels)
    sizes = {who: _vocab(op, shapes, who) for who in ("student", "teacher")}
    student = "student_hidden" if "student_hidden" in shapes else "student_logits"
    leading = shapes[student][:-1]
    for name in (*_ROWS, labels, "token_weight"):
        shape, own = shapes.get(name), int(name in _ROWS)  # dimensions of its own
        if shape is not None and (len(shape) < own or shape[: len(shape) - own] != leading):
            raise ValueError(
                f"{op}: {name} has shape {list(shape)} but {student} has shape {list(shapes[student])}; "
                f"{name} must have its leading dimensions, {list(leading)}"
            )
    first, second = sizes["student"], sizes["teacher"]
    assert first is not None
    if split and second not in (None, first):
        raise ValueError(
            f"{op}: the student's and the teacher's parts of a split vocabulary must have the same size; got "
            f"{first} and {second} entries; pad both to one size, and pass vocab"
        )
    if options.vocab is None and second not in (None, first):
        raise ValueError(
            f"{op}: the student has V={first} but the teacher has V={second}; "
            "if they differ in padding, pass vocab= the number of entries that both have"
        )
    size = first if options.vocab is None else options.vocab
    for who, width in sizes.items():
        if width is not None and width < size:
            raise ValueError(f"{op}: vocab={size} but the {who} has V={width}; vocab must be at most that")
    indices, values = (shapes.get(f"teacher_topk.{name}") for name in ("indices", "values"))
    if indices is not None and values is not None:
        if indices != values or indices[-1] < 1:
            raise ValueError(
                f"{op}: teacher_topk.indices has shape {list(indices)} and values has {list(values)}; "
                "both must be [..., K] with K >= 1"
            )
        if indices[-1] > size:
            raise ValueError(f"{op}: teacher_topk has K={indices[-1]} but the vocabulary has {size} entries")
    return leading, size


def _check_sources(options: JsdOptions, shapes: Mapping[str, Shape], labels: str) -> None:
    op = options.op
    if ("teacher_hidden" in shapes) != ("teacher_weight" in shapes):
        raise ValueError(f"{op}: teacher_hidden and teacher_weight go together; got one of them")
    if "teacher_bias" in shapes and "teacher_hidden" not in shapes:
        raise ValueError(f"{op}: teacher_bias goes with teacher_hidden and teacher_weight")
    given = sum(name in shapes for name in ("teacher_hidden", "teacher_logits", "teacher_topk.indices"))
    if given != 1:
        one = "teacher_hidden with teacher_weight, " if op == OP else ""
        raise ValueError(f"{op}: pass exactly one of {one}teacher_logits, teacher_topk; got {given}")
    if options.teacher_grad and "teacher_topk.indices" in shapes:
        raise ValueError(f"{op}: teacher_grad=True needs a teacher with all logits, not teacher_topk")
    if options.hard_weight > 0 and labels not in shapes:
        raise ValueError(f"{op}: hard_weight={options.hard_weight} needs {labels}, the hard labels")


def _vocab(op: str, shapes: Mapping[str, Shape], who: str) -> int | None:
    """The entries of a model, padding included; None for a top-k teacher."""
    if f"{who}_hidden" in shapes:
        return check_head(op, shapes, whose=f"{who}_")
    logits = shapes.get(f"{who}_logits")
    if logits is not None and (len(logits) < 1 or logits[-1] < 1):
        raise ValueError(f"{op}: {who}_logits must be [..., V] with V >= 1; got shape {list(logits)}")
    return None if logits is None else logits[-1]


def _arguments(s: Sizes, make: Make) -> dict[str, Any]:
    teacher = s.teacher_hidden or s.hidden
    return {
        "student_hidden": make(s.tokens, s.hidden),
        "student_weight": make(s.vocab, s.hidden, of_weight=True),
        "teacher_hidden": make(s.tokens, teacher, constant=True),
        "teacher_weight": make(s.vocab, teacher, constant=True),
    }


CALLS = {"linear_jsd": WarmUpCall(("hidden", "vocab"), _arguments)}
