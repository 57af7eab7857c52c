"""What the specs of the ops share: options, statistics, and checks of options and shapes.  No framework."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypedDict, TypeVar, get_args

from onchip.core.sizes import UNITS

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)
ScratchBytes = int | float | str | None
"""Bytes; a part of the logits' memory; a text with a unit."""


# ---------------------------------------------------------------------------------------------------------- options


def require_one_of(op: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise unless `value` is one of the words."""
    if not isinstance(value, str) or value not in allowed:  # an array has no truth value
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def require_bool(op: str, name: str, value: Any) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False; got {type(value).__name__}")


def is_symbol(value: Any) -> bool:
    """Whether it stands for a number that make_fx traces, which is PyTorch's SymInt or SymFloat."""
    return type(value).__module__ == "torch" and type(value).__name__ in ("SymInt", "SymFloat")


def require_int(op: str, name: str, value: Any) -> None:
    """Raise unless `value` is an integer of 64 bits, as frameworks take it."""
    if isinstance(value, bool) or not (isinstance(value, Integral) or is_symbol(value)):
        raise TypeError(f"{op}: {name} must be an int; got {type(value).__name__}")
    number: Any = value
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {name} must fit in 64 bits; got {value}")


def require_positive_int(op: str, name: str, value: Any) -> None:
    """Raise unless `value` is None or an integer above 0."""
    if value is not None:
        require_int(op, name, value)
        if value <= 0:
            raise ValueError(f"{op}: {name} must be positive; got {value}")


def require_number(op: str, name: str, value: Any) -> None:
    """Raise unless `value` is a finite number."""
    if isinstance(value, bool) or not (isinstance(value, Real) or is_symbol(value)):
        raise TypeError(f"{op}: {name} must be a number; got {type(value).__name__}")
    number: Any = value
    if not -math.inf < number < math.inf:  # not math.isfinite: torch.compile can't trace it for a changing number
        raise ValueError(f"{op}: {name} must be finite; got {value}")


def require_positive(op: str, name: str, value: Any, remedy: str = "") -> None:
    """Raise unless `value` is a finite number above 0."""
    require_number(op, name, value)
    if value <= 0:
        raise ValueError(f"{op}: {name} must be above 0; got {value}{remedy}")


def require_fraction(op: str, name: str, value: Any) -> None:
    """Raise unless `value` is a number in [0, 1]."""
    require_number(op, name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{op}: {name} must be in [0, 1]; got {value}")


def scratch_in_bytes(op: str, value: Any, logits: int) -> Any:
    """`scratch_bytes` in bytes, for a call with this many logits: a text has a unit, and a float is a part of the
    logits' memory in float32.  None means the default, and so does a part of no logits.
    """
    if value is None or type(value) is int:
        return value
    if isinstance(value, str):
        size = _bytes_of(value)
        if size is None:
            meant = re.sub(r"([kmg])(i?b)?$", lambda unit: f"{unit[1].upper()}iB", value, flags=re.IGNORECASE)
            hint = "" if _bytes_of(meant) is None else f"; did you mean {meant!r}?"
            raise ValueError(
                f"{op}: scratch_bytes as a text must be like '1GiB', '512 MiB' or '0.5 KiB'; got {value!r}{hint}"
            )
        return size
    if isinstance(value, Integral) or not isinstance(value, Real):
        return value  # bytes already, which the options check
    part: Any = value
    if not 0 < part <= 1:
        raise ValueError(
            f"{op}: scratch_bytes={value} is a float, a part of the float32 logits, and must be above 0 and at most 1; "
            "pass an int for bytes"
        )
    return int(part * 4 * logits) or None


def _bytes_of(text: str) -> int | None:
    """Of a number with one of the `UNITS`; None of another text."""
    number, unit = text[:-3].strip(), text[-3:]
    if unit not in UNITS or not number.replace(".", "", 1).isdecimal():
        return None
    return int(min(float(number) * UNITS[unit], 2**63))  # which the options refuse


@dataclass(frozen=True)
class LossOptions:
    """The options of every cross-entropy that are plain numbers and words."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    check_inputs: bool = False
    scratch_bytes: int | None = None
    return_stats: bool = False

    @property
    def in_token_weight(self) -> bool:
        """Whether a class weight is a factor of each token's loss: neither smoothing nor z-loss follows it."""
        return self.label_smoothing == 0 and self.z_loss == 0


Number = TypeVar("Number")
Flag = TypeVar("Flag", bound=bool)
No = Literal[False]
Yes = Literal[True]
A = TypeVar("A")
"""A framework's arrays."""


class Returning(TypedDict, Generic[Flag], total=False):
    """The keyword that asks for statistics beside a loss: with False for no, True for yes, and bool for who knows."""

    return_stats: Flag


class LossStats(NamedTuple, Generic[A]):
    """Per-token statistics of a cross-entropy, without gradients; ignored tokens hold 0 (False, in argmax -1)."""

    lse: A
    """[...] of the loss's dtype: log-sum-exp of the final logits."""
    log_prob: A
    """[...] of the loss's dtype: log-probability of the target; with soft labels q it is sum(q * log(p))."""
    entropy: A
    """[...] of the loss's dtype: entropy of the softmax, in nats."""
    correct: A
    """[...] bool: whether the target, or with soft labels the likeliest one, is the argmax."""
    argmax: A
    """[...] int64 (in JAX int32): the vocabulary index of the largest logit (the first one, where logits tie)."""
    target_logit: A
    """[...] of the loss's dtype: the target's final logit z; with soft labels q it is sum(q * z)."""


class OptionsOfLoss(TypedDict, Generic[Number], total=False):
    """These and others by keyword, as every cross-entropy and its module take them; `Number` is a framework's."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: Number
    z_loss: Number
    softcap: Number | None
    logit_scale: Number
    check_inputs: bool
    scratch_bytes: ScratchBytes


class LossTerms(NamedTuple):
    """Those of a loss's options that its formulas have, and that kernels take as one argument: numbers, or arrays of no
    dimension."""

    label_smoothing: Any = 0.0
    z_loss: Any = 0.0

    @staticmethod
    def of(options: Any) -> "LossTerms":
        """Of an op's options; what these lack is 0."""
        return LossTerms(*[getattr(options, name, 0.0) for name in LossTerms._fields])

    @property
    def of_lse(self) -> bool:
        """Whether the loss depends on the log-sum-exp by itself."""
        return bool(self.z_loss > 0)

    @property
    def nonzero(self) -> "LossTerms":
        """Of numbers: None for 0, which `vocab/loss.py` leaves out."""
        return LossTerms(*[x or None for x in self])

    @property
    def there(self) -> bool:
        """Whether any isn't None."""
        return any(x is not None for x in self)


def _require_softcap(op: str, name: str, value: Any) -> None:
    if value is not None:
        require_positive(op, name, value, remedy="; pass None for no softcap")


def _require_not_negative(op: str, name: str, value: Any) -> None:
    require_number(op, name, value)
    if value < 0:
        raise ValueError(f"{op}: {name} must be 0 or more; got {value}")


_NUMBERS: dict[str, tuple[type, Callable[[str, str, Any], None]]] = {
    "ignore_index": (int, require_int),
    "vocab": (int, require_positive_int),
    "scratch_bytes": (int, require_positive_int),
    "label_smoothing": (float, require_fraction),
    "z_loss": (float, _require_not_negative),
    "softcap": (float, _require_softcap),
    "logit_scale": (float, require_positive),
    "temperature": (float, require_positive),
    "beta": (float, require_fraction),
    "hard_weight": (float, require_fraction),
}


def check_shift(op: str, shift: bool, tokens: tuple[int, ...], what: str) -> None:
    """Raise ValueError for ids that are to be shifted along a sequence dimension that `tokens`, the leading dimensions,
    don't have; `what` says which argument of which shape is needed."""
    if shift and not tokens:
        raise ValueError(
            f"{op}: shift=True needs {what}, a sequence of S tokens; got no dimension; pass shift=False for a single "
            "token"
        )


def check_options(op: str, options: Any, /, **words: Sequence[str]) -> None:
    """Raise if one of `options`, a dataclass, is wrong; convert NumPy's numbers to Python's, and ints to floats.

    An option of one name means the same in every op.  `words` are the values that word options may have; options that
    are neither words nor numbers are flags.
    """
    words["reduction"] = REDUCTIONS
    for name in (field.name for field in fields(options)):  # PyTorch 2.11 can't trace `vars(options).items()`
        value = getattr(options, name)
        if name in words:
            require_one_of(op, name, value, words[name])
        elif name in _NUMBERS:
            kind, check = _NUMBERS[name]
            check(op, name, value)
            if value is not None:
                object.__setattr__(options, name, kind(value))
        else:
            require_bool(op, name, value)


# ----------------------------------------------------------------------------------------------------------- shapes

Shapes = Mapping[str, tuple[int, ...]]
"""Of the arguments that are given, by name."""


def shapes_of(arrays: Mapping[str, Any]) -> Shapes:
    return {name: tuple(x.shape) for name, x in arrays.items()}


def check_head(op: str, shapes: Shapes, *, layout: str | None = None, whose: str = "") -> int:
    """Raise ValueError unless hidden is [..., H], weight [V, H] and bias, if there is one, [V]; return V.

    A front end with an argument weight_layout gives it: for "hv" the weight is [H, V].  `whose` comes before the
    arguments' names: "student_" for student_hidden.
    """
    h, w, b = f"{whose}hidden", f"{whose}weight", f"{whose}bias"
    hidden, weight, bias = shapes[h], shapes[w], shapes.get(b)
    must = f"{w} must be [H, V] with weight_layout='hv'" if layout == "hv" else f"{w} must be [V, H]"
    if len(weight) != 2 or weight[0] < 1 or weight[1] < 1:
        raise ValueError(f"{op}: {must}, V, H >= 1; got shape {list(weight)}")
    if len(hidden) < 1:
        raise ValueError(f"{op}: {h} must be [..., H]; got no dimension")
    vocab, size = weight[::-1] if layout == "hv" else weight
    if hidden[-1] != size:
        other = {"vh": "hv", "hv": "vh"}.get(layout or "")
        remedy = f"; or pass weight_layout={other!r}" if other and hidden[-1] == vocab else ""
        if layout is None and hidden[-1] == vocab:
            remedy = f"; pass {w}.T, or, if {h} holds logits, the hidden states that made them"
        raise ValueError(f"{op}: {h} has H={hidden[-1]} but {w} has H={size}; {must}{remedy}")
    if bias is not None and bias != (vocab,):
        raise ValueError(f"{op}: {b} has shape {list(bias)} but {w} has V={vocab}; {b} must be [V]")
    return vocab


def check_logits(op: str, shapes: Shapes) -> int:
    """Raise ValueError unless logits are [..., V]; return V."""
    logits = shapes["logits"]
    if len(logits) < 1:
        raise ValueError(f"{op}: logits must be [..., V]; got no dimension")
    if logits[-1] < 1:
        raise ValueError(f"{op}: logits must be [..., V] with V >= 1; got shape {list(logits)}")
    return logits[-1]


def one_target(op: str, target: Any, labels: Any, *, needed: bool = True, name: str = "target") -> tuple[str, Any]:
    """The name and the value of the one that is given: `labels` is another name for the argument `target`.

    Raise if both are, and, where one is `needed`, if none is.
    """
    if target is not None and labels is not None:
        raise TypeError(f"{op}: labels is another name for {name}; pass one of them")
    if needed and target is None and labels is None:
        raise TypeError(f"{op}: {name} is missing or None; pass it (labels is another name for it)")
    return (name, target) if labels is None else ("labels", labels)


def check_tokens(op: str, shapes: Shapes, target: str, of: str) -> None:
    """Raise ValueError unless the argument `target` has the leading dimensions of `of`, and what has a number for each
    token has target's shape; a temperature may be one for all."""
    tokens, leading = shapes[target], shapes[of][:-1]
    if tokens != leading:
        whole, remedy = shapes[of], ""
        if of == "logits" and len(whole) > 2 and tokens == (whole[0], *whole[2:]):
            remedy = "; if V is their second dimension, as in F.cross_entropy, move it to the end"
        elif tokens and leading and tokens == (*leading[:-1], leading[-1] - 1):
            remedy = "; if the first label of each sequence was cut off, pass all labels with shift=True"
        raise ValueError(
            f"{op}: {target} has shape {list(tokens)} but {of} has shape {list(shapes[of])}; "
            f"{target} must have {possessive(of)} leading dimensions, {list(leading)}{remedy}"
        )
    check_by_token(op, shapes, tokens, f"{possessive(target)} shape")


def check_by_token(op: str, shapes: Shapes, tokens: tuple[int, ...], what: str) -> None:
    """Raise ValueError unless token weights and temperatures have the shape `tokens`, which `what` says in words; a
    temperature may be one for all."""
    for name in ("token_weight", "temperature"):
        shape = shapes.get(name, tokens)
        if shape != tokens and not (name == "temperature" and shape == ()):
            raise ValueError(f"{op}: {name} has shape {list(shape)}; it must have {what}, {list(tokens)}")


def raise_for_label(
    op: str,
    name: str,
    where: Sequence[int],
    label: int,
    vocab: int,
    ignore_index: int | None,
    wrong: int,
    total: int,
) -> NoReturn:
    """Raise for the first of the labels of the argument `name` that are out of range: `wrong` of `total`."""
    position = f"{name}[{', '.join(map(str, where))}]" if where else name
    legal = "not in" if ignore_index is None else f"neither ignore_index ({ignore_index}) nor in"
    remedy = f"; if {label} marks tokens to ignore, pass ignore_index={label}"
    raise ValueError(
        f"{op}: {position} is {label}, which is {legal} [0, {vocab}); "
        f"{wrong} of {total} {name.rstrip('s')}s are out of range"
        f"{remedy if label < 0 and ignore_index is not None else ''}"
    )


def check_class_weight(op: str, shapes: Shapes, vocab: int) -> None:
    """Raise ValueError unless class_weight, if there is one, is [V]."""
    shape = shapes.get("class_weight", (vocab,))
    if shape != (vocab,):
        raise ValueError(f"{op}: class_weight has shape {list(shape)}; it must be [V], [{vocab}]")


def possessive(name: str) -> str:
    """ "target's", "labels'"."""
    return name + ("'" if name.endswith("s") else "'s")
