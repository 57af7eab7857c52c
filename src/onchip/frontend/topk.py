"""K entries of the vocabulary for each token, each with a number: a teacher for linear_jsd, or soft labels."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar

from onchip.frontend.options import (
    check_by_token,
    check_class_weight,
    check_head,
    check_logits,
    check_tokens,
    possessive,
)

OF_LABELS = ("probs", "log_probs")
WORDS = {"kind": ("log_probs", "logits", "probs"), "rest": ("tail", "truncated", "renormalised")}

Shape = tuple[int, ...]
A_co = TypeVar("A_co", covariant=True)


class TopK(NamedTuple, Generic[A_co]):
    """A teacher, or soft labels, of which only K entries per token are known, usually the most likely ones.

    With s the student's full softmax and t the teacher's, the three meanings of `rest` are:

    - "tail": all other tokens are one more outcome, of probability 1 - sum(t_k) for the teacher and 1 - sum(s_k) for
      the student.  The loss is a lower bound of the full divergence.
    - "truncated": the loss's sum runs over the K entries only, with probabilities as they are.  It is no
      divergence: with beta 0 or 1 it can be negative, and its minimum need not be where the models agree.
    - "renormalised": both distributions are conditioned on the K entries: s_k / sum(s), t_k / sum(t).  Probability that
      the student puts elsewhere costs nothing.

    As the target of `linear_cross_entropy` or `cross_entropy` it must have rest="truncated".  In JAX it is a pytree of
    its two arrays, so jitted functions take it.

    Raises:
        ValueError: kind or rest is none of the words below.  The functions that take a `TopK` raise if they can't use
            it, for example for a log-probability above 0; they allow for rounding, up to 1e-3 in float32 and float64,
            1/16 in float16 and 1/2 in bfloat16.
    """

    indices: A_co
    """[..., K] of any integer dtype in [0, V), distinct within a token."""
    values: A_co
    """[..., K] float: the teacher's log-probabilities or logits of these tokens, or their probabilities."""
    kind: Literal["log_probs", "logits", "probs"]
    """"log_probs": log-probabilities of the full vocabulary at the `temperature` of the call, used as they are: a call
    with temperature=2 takes (logits / 2).log_softmax(-1).  Those of temperature 1 are logits up to a constant.
    "logits": divided by `temperature`; their normaliser is not known, so they need rest="renormalised".
    "probs": probabilities, used as they are; only for the target of a cross-entropy."""
    rest: Literal["tail", "truncated", "renormalised"]
    """"tail", "truncated" or "renormalised": how the other entries count."""


_make = TopK.__new__


def _checked(cls: type[TopK[Any]], indices: Any, values: Any, kind: Any, rest: Any) -> TopK[Any]:
    """A `TopK` with checked words; values that are no text, as when a tree of other things is built, pass."""
    for name, word in (("kind", kind), ("rest", rest)):
        if isinstance(word, str) and word not in WORDS[name]:
            near = [(of, found) for of in (name, *WORDS) for found in get_close_matches(word, WORDS[of], 1)][:1]
            hint = "".join(f"; did you mean {'' if of == name else of + '='}{found!r}?" for of, found in near)
            raise ValueError(f"TopK: {name} must be one of {', '.join(map(repr, WORDS[name]))}; got {word!r}{hint}")
    return _make(cls, indices, values, kind, rest)


_checked.__qualname__ = "TopK"  # Python names it in the error of a call with too few arguments
# A NamedTuple's class can't have a __new__ of its own, and a subclass with one is no named tuple to torch.compile.
TopK.__new__ = _checked  # type: ignore[method-assign, assignment]


def most_log_prob(eps: float) -> float:
    """The largest number that passes as a log-probability, in a dtype with this `eps`.  It is above 0, since the
    difference z - lse of two rounded numbers may be."""
    return max(64 * eps, 1e-3)


def raise_for_log_prob(op: str, name: str, where: Sequence[int], value: float, eps: float) -> NoReturn:
    """Raise for a number of the argument `name` that can't be a log-probability."""
    other = "kind='logits' with rest='renormalised'" if name == "teacher_topk" else "kind='probs' for probabilities"
    raise ValueError(
        f"{op}: {name}.values[{', '.join(map(str, where))}] is {value:.6g}, but a log-probability is at most 0 (up to "
        f"{most_log_prob(eps):g} passes for rounding); subtract the logits' log-sum-exp over the whole vocabulary, or "
        f"pass {other}"
    )


def check_labels(op: str, name: str, target: TopK[Any]) -> None:
    """Raise unless a cross-entropy can have this target, an argument called `name`."""
    if target.kind not in OF_LABELS:
        remedy = "; pass log-probabilities, as values.log_softmax(-1)" if target.kind == "logits" else ""
        raise ValueError(f"{op}: {name}.kind must be 'probs' or 'log_probs'; got {target.kind!r}{remedy}")
    if target.rest != "truncated":
        raise ValueError(
            f"{op}: {name}.rest must be 'truncated', a sum over only the K entries; got {target.rest!r}, which only "
            "linear_jsd and jsd take"
        )


def check_loss_shapes(
    op: str, name: str, shapes: Mapping[str, Shape], of: str, *, soft: bool, layout: str | None = None
) -> None:
    """Raise ValueError unless the shapes of a cross-entropy's arguments are right, for ids or `soft` labels called
    `name`: `of` names what has the tokens, "hidden" or "logits", and `layout` is as in `check_head`."""
    vocab = check_head(op, shapes, layout=layout) if of == "hidden" else check_logits(op, shapes)
    if soft:
        check_label_shapes(op, name, shapes, of, vocab)
    else:
        check_tokens(op, shapes, name, of)
    check_class_weight(op, shapes, vocab)


def check_label_shapes(op: str, name: str, shapes: Mapping[str, Shape], of: str, vocab: int) -> None:
    """Raise ValueError unless soft labels are [..., V], or [..., K] twice, and what goes with them has its shape.

    What is by token is [...].  `name` is the front end's word for targets, and `of` names what
    has the leading dimensions.
    """
    leading = shapes[of][:-1]
    if name in shapes and shapes[name] != (*leading, vocab):
        raise ValueError(
            f"{op}: {name} has shape {list(shapes[name])}; probabilities must be [..., V], {[*leading, vocab]}"
        )
    for part in (f"{name}.indices", f"{name}.values"):
        shape = shapes.get(part)
        if shape is not None and (len(shape) < 1 or shape[:-1] != leading or shape[-1] < 1):
            raise ValueError(
                f"{op}: {part} has shape {list(shape)} but {of} has shape {list(shapes[of])}; it must have "
                f"{possessive(of)} leading dimensions, {list(leading)}, and one more for K >= 1 entries"
            )
    indices, values = (shapes.get(f"{name}.{part}") for part in ("indices", "values"))
    if indices is not None and values is not None and indices != values:
        raise ValueError(
            f"{op}: {name}.indices has shape {list(indices)} but values has {list(values)}; they must have the same "
            "shape"
        )
    check_by_token(op, shapes, leading, f"{possessive(of)} leading dimensions")


def refuse_options(op: str, options: Any) -> None:
    """Raise for options that soft labels don't have."""
    if options.ignore_index != -100:
        raise ValueError(
            f"{op}: ignore_index={options.ignore_index} is only for targets that are ids; give a token that is to be "
            "ignored a token_weight of 0"
        )


def refuse_shift(op: str, shift: bool, name: str) -> None:
    """Raise if soft labels for logits, an argument of this name, are to be shifted."""
    if shift:
        raise ValueError(
            f"{op}: shift=True is only for targets that are ids; pass logits[..., :-1, :] with {name}[..., 1:, :], the "
            "next positions' labels"
        )
