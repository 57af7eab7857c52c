"""What every front end of linear_jsd and jsd shares: options, top-k teachers, shapes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from onchip.frontend.options import (
    REDUCTIONS,
    check_head,
    require_bool,
    require_fraction,
    require_int,
    require_one_of,
    require_positive,
    require_positive_int,
    to_python_numbers,
)

OP = "linear_jsd"
LOGITS_OP = "jsd"
KINDS = ("log_probs", "logits")
RESTS = ("tail", "truncated", "renormalised")


class TopK(NamedTuple):
    """A teacher of which only the K most likely tokens are known.

    With s the student's full softmax, the three meanings of `rest` are:

    - "tail": all other tokens are one more outcome, of probability 1 - sum(t_k) for the teacher and 1 - sum(s_k) for
      the student.  A lower bound of the full divergence.
    - "truncated": the divergence's sum runs over the K entries alone, with probabilities as they are.  That is no
      divergence: with beta 0 or 1 it can be negative, and where it is least the models need not agree.
    - "renormalised": both models given that the token is one of the K: s_k / sum(s), t_k / sum(t).  The mass that the
      student puts elsewhere costs nothing.
    """

    indices: Any
    """[..., K] of any integer dtype in [0, V), distinct within a token."""
    values: Any
    """[..., K] float: the teacher's log-probabilities or logits of these tokens."""
    kind: str
    """"log_probs": log-probabilities of the full vocabulary at the `temperature` of the call, used as they are.
    "logits": divided by `temperature`; their normaliser is not known, so they need rest="renormalised"."""
    rest: str
    """"tail", "truncated" or "renormalised"."""


# ---------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """The options that are plain numbers and words, checked when made."""

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
        op = self.op
        require_fraction(op, "beta", self.beta)
        require_fraction(op, "hard_weight", self.hard_weight)
        require_positive(op, "temperature", self.temperature)
        for name in ("temperature_squared", "teacher_grad", "check_inputs"):
            require_bool(op, name, getattr(self, name))
        require_int(op, "ignore_index", self.ignore_index)
        require_one_of(op, "reduction", self.reduction, REDUCTIONS)
        require_positive_int(op, "vocab", self.vocab)
        require_positive_int(op, "scratch_bytes", self.scratch_bytes)
        to_python_numbers(self)

    @property
    def soft_factor(self) -> float:
        """What the divergence is multiplied by."""
        return (1 - self.hard_weight) * (self.temperature**2 if self.temperature_squared else 1.0)


# ------------------------------------------------------------------------------------------------ what fits together


@dataclass(frozen=True)
class Shapes:
    """Shapes of the arrays of a call, None where not given."""

    op: str
    labels: str = "target"
    """What the front end calls its target."""
    student_hidden: tuple[int, ...] | None = None
    student_weight: tuple[int, ...] | None = None
    student_bias: tuple[int, ...] | None = None
    student_logits: tuple[int, ...] | None = None
    teacher_hidden: tuple[int, ...] | None = None
    teacher_weight: tuple[int, ...] | None = None
    teacher_bias: tuple[int, ...] | None = None
    teacher_logits: tuple[int, ...] | None = None
    indices: tuple[int, ...] | None = None
    values: tuple[int, ...] | None = None
    target: tuple[int, ...] | None = None
    token_weight: tuple[int, ...] | None = None

    def check(self, options: Options) -> tuple[tuple[int, ...], int]:
        """Raise ValueError for what doesn't fit together; return the tokens' shape and the entries that count."""
        op = self.op
        self._check_sources(options)
        if self.student_hidden is not None:
            student_size = self._check_head("student")
            leading, student = self.student_hidden[:-1], "student_hidden"
            student_shape = self.student_hidden
        else:
            assert self.student_logits is not None
            student_shape, student = self.student_logits, "student_logits"
            student_size = _last(op, student, student_shape, "V")
            leading = student_shape[:-1]
        teacher_size = None
        if self.teacher_hidden is not None:
            teacher_size = self._check_head("teacher")
        elif self.teacher_logits is not None:
            teacher_size = _last(op, "teacher_logits", self.teacher_logits, "V")
        for name in ("teacher_hidden", "teacher_logits", "indices", "values"):
            shape = getattr(self, name)
            shown = f"teacher_topk.{name}" if name in ("indices", "values") else name
            if shape is not None and (len(shape) < 1 or shape[:-1] != leading):
                raise ValueError(
                    f"{op}: {shown} has shape {list(shape)} but {student} has shape {list(student_shape)}; "
                    "their leading dimensions must be the same"
                )
        size = student_size if options.vocab is None else options.vocab
        for name, width in (("student", student_size), ("teacher", teacher_size)):
            if width is not None and width < size:
                if options.vocab is None:
                    break
                raise ValueError(f"{op}: vocab={size} but the {name} has V={width}; vocab must be at most that")
        if options.vocab is None and teacher_size not in (None, student_size):
            raise ValueError(
                f"{op}: the student has V={student_size} but the teacher has V={teacher_size}; "
                "if they differ in padding, pass vocab= the number of entries that both have"
            )
        if self.indices is not None:
            assert self.values is not None
            if self.indices != self.values or self.indices[-1] < 1:
                raise ValueError(
                    f"{op}: teacher_topk.indices has shape {list(self.indices)} and values {list(self.values)}; "
                    "both must be [..., K] with K >= 1"
                )
            if self.indices[-1] > size:
                raise ValueError(f"{op}: teacher_topk has K={self.indices[-1]} but there are {size} tokens")
        for name in ("target", "token_weight"):
            shape = getattr(self, name)
            if shape is not None and shape != leading:
                shown = self.labels if name == "target" else name
                raise ValueError(
                    f"{op}: {shown} has shape {list(shape)} but {student} has shape {list(student_shape)}; "
                    f"{shown} must have its leading dimensions, {list(leading)}"
                )
        return leading, size

    def _check_sources(self, options: Options) -> None:
        op = self.op
        if (self.teacher_hidden is None) != (self.teacher_weight is None):
            raise ValueError(f"{op}: teacher_hidden and teacher_weight go together; got one of them")
        if self.teacher_bias is not None and self.teacher_hidden is None:
            raise ValueError(f"{op}: teacher_bias goes with teacher_hidden and teacher_weight")
        given = [x is not None for x in (self.teacher_hidden, self.teacher_logits, self.indices)]
        if sum(given) != 1:
            one = "teacher_hidden with teacher_weight, " if op == OP else ""
            raise ValueError(f"{op}: give exactly one of {one}teacher_logits, teacher_topk; got {sum(given)}")
        if options.teacher_grad and self.indices is not None:
            raise ValueError(f"{op}: teacher_grad=True needs a teacher with all logits, not teacher_topk")
        if options.hard_weight > 0 and self.target is None:
            raise ValueError(f"{op}: hard_weight={options.hard_weight} needs {self.labels}, the hard labels")

    def _check_head(self, who: str) -> int:
        hidden, weight, bias = (getattr(self, f"{who}_{part}") for part in ("hidden", "weight", "bias"))
        return check_head(self.op, hidden, weight, bias, whose=f"{who}_")


def _last(op: str, name: str, shape: tuple[int, ...], letter: str) -> int:
    if len(shape) < 1 or shape[-1] < 1:
        raise ValueError(f"{op}: {name} must be [..., {letter}] with {letter} >= 1; got shape {list(shape)}")
    return shape[-1]


def check_topk(op: str, topk: Any) -> None:
    """Raise unless `topk` is a TopK whose words are known and go together."""
    if not isinstance(topk, TopK):
        raise TypeError(f"{op}: teacher_topk must be a TopK(indices, values, kind, rest); got {type(topk).__name__}")
    require_one_of(op, "teacher_topk.kind", topk.kind, KINDS)
    require_one_of(op, "teacher_topk.rest", topk.rest, RESTS)
    if topk.kind == "logits" and topk.rest != "renormalised":
        raise ValueError(
            f"{op}: teacher_topk.rest={topk.rest!r} needs the teacher's probabilities: pass kind='log_probs', "
            "or rest='renormalised', which needs no normaliser"
        )
