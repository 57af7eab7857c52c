"""What the public functions check at their door, and the call that they make: what is read off its arguments."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import (
    DTYPES,
    check_kinds,
    copied_rows,
    product_dtype,
    refuse_gradient,
    require_tensors,
)
from onchip.ops.linear_jsd.memory import Head, Problem
from onchip.ops.linear_jsd.spec import Options, Shapes, TopK, check_topk
from onchip.ops.linear_jsd.torch_walk import Model
from onchip.vocab.torch.tiles import Tokens, select_tokens

_OPTIONAL = (
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "teacher_logits",
    "target",
    "token_weight",
)


def check_tensors(
    op: str, options: Options, named: dict[str, Any], topk: Any
) -> tuple[torch.Size, int, list[torch.dtype]]:
    """Raise for what can be seen without reading values.

    Return the tokens' shape, the entries that count, and the dtype of both models' products (of none: float32).
    """
    if topk is not None:
        check_topk(op, topk)
        named = named | {"teacher_topk.indices": topk.indices, "teacher_topk.values": topk.values}
    tensors = require_tensors(op, named, _OPTIONAL)
    shapes: dict[str, Any] = {name.removeprefix("teacher_topk."): tuple(x.shape) for name, x in tensors.items()}
    leading, size = Shapes(op, **shapes).check(options)
    check_kinds(op, tensors, integers=("target", "teacher_topk.indices"), constants=("token_weight",))
    if topk is not None:
        refuse_gradient(op, "teacher_topk.values", topk.values)
    dtypes = [
        product_dtype(op, tensors, whose) if f"{whose}hidden" in tensors else torch.float32
        for whose in ("student_", "teacher_")
    ]
    return torch.Size(leading), size, dtypes


def check_indices(op: str, indices: Tensor, kept: Tensor | None, vocab: int) -> None:
    """Raise for indices [..., K] of tokens that are `kept` [...] if they are out of range or repeated; reads them."""
    ids = indices.to(torch.int64)
    wrong = (ids < 0) | (ids >= vocab)
    if kept is not None:
        wrong &= kept[..., None]
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        raise ValueError(
            f"{op}: teacher_topk.indices[{', '.join(map(str, where))}] is {int(ids[tuple(where)])}, "
            f"which is not in [0, {vocab})"
        )
    ordered = ids.sort(-1).values
    same = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if kept is not None:
        same &= kept
    if bool(same.any()):
        raise ValueError(f"{op}: teacher_topk.indices must be distinct within a token; {int(same.sum())} are not")


# ---------------------------------------------------------------------------------------------------------- the call

PARTS = ("hidden", "weight", "bias", "logits")
PARAMETERS = tuple(f"{who}_{part}" for who in ("student", "teacher") for part in PARTS)


class Call(NamedTuple):
    """What the operators of every backend are told."""

    student_hidden: Tensor | None  # [..., Hs]
    student_weight: Tensor | None  # [V, Hs]
    student_bias: Tensor | None  # [V]
    student_logits: Tensor | None  # [..., V]
    teacher_hidden: Tensor | None
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    teacher_logits: Tensor | None
    indices: Tensor | None  # [..., K] of a top-k teacher, and so `values`
    values: Tensor | None
    target: Tensor | None  # [...]
    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    student_dtype: torch.dtype  # of its products
    teacher_dtype: torch.dtype
    shape: tuple[int, ...]  # [...]
    size: int  # vocabulary entries that count
    topk_kind: str
    topk_rest: str
    options: Options
    stash: bool  # gradients are made in forward and kept
    grads: tuple[bool, ...]  # of `PARAMETERS`

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self[:8]

    @property
    def first(self) -> Tensor:
        x = self.student_logits if self.student_hidden is None else self.student_hidden
        assert x is not None
        return x

    def new_loss(self) -> Tensor:
        """Memory for the result."""
        return self.first.new_empty(self.shape if self.options.reduction == "none" else (), dtype=torch.float32)

    @property
    def tokens_in_all(self) -> int:
        return math.prod(self.shape)

    def tokens(self, *, check: bool) -> Tokens:
        """Those that count; with `check`, values are checked on the CPU, and elsewhere where that was asked for."""
        target, ignore_index = self.target, self.options.ignore_index
        if target is None:
            target, ignore_index = torch.zeros(self.shape, dtype=torch.int64, device=self.first.device), -1
        tokens = select_tokens(
            self.options.op,
            target,
            self.size,
            self.token_weight,
            None,
            self.normalizer,
            ignore_index=ignore_index,
            reduction=self.options.reduction,
            temperature=1.0,
            check_values=check and self.options.check_inputs,
        )
        if check and self.indices is not None and (self.options.check_inputs or self.indices.device.type == "cpu"):
            check_indices(
                self.options.op, self.indices, None if self.target is None else target != ignore_index, self.size
            )
        return tokens

    def model(self, who: int, grads: Sequence[bool]) -> Model | None:
        """The student (0) or the teacher (1)."""
        hidden, weight, bias, logits = self.parameters[4 * who : 4 * who + 4]
        dtype = (self.student_dtype, self.teacher_dtype)[who]
        if hidden is None and logits is None:
            return None
        return Model(
            None if hidden is None else hidden.reshape(-1, hidden.shape[-1]).to(dtype),
            None if weight is None else weight.to(dtype),
            # In the products' dtype first, as F.linear does under autocast.
            None if bias is None else bias.to(dtype).float(),
            None if logits is None else logits.reshape(-1, logits.shape[-1]),
            tuple(grads[4 * who : 4 * who + 4]),  # type: ignore[arg-type]
        )

    def head(self, who: int) -> Head:
        hidden, weight, _, logits = self.parameters[4 * who : 4 * who + 4]
        grads = self.grads[4 * who : 4 * who + 4]
        if hidden is None or weight is None:
            return Head(vocab=0 if logits is None else logits.shape[-1], grad_logits=grads[3])
        return Head(
            hidden.shape[-1],
            weight.shape[0],
            DTYPES[(self.student_dtype, self.teacher_dtype)[who]],
            DTYPES[hidden.dtype],
            DTYPES[weight.dtype],
            *grads,
        )

    def problem(self, tokens: Tokens | None = None) -> Problem:
        """`tokens` None: before targets are read, the worst case."""
        device = "cpu" if self.first.device.type == "cpu" else "cuda"
        return Problem(
            tokens=self.tokens_in_all,
            vocab=self.size,
            student=self.head(0),
            teacher=self.head(1),
            topk=0 if self.indices is None else self.indices.shape[-1],
            hard=self.options.hard_weight > 0,
            device=device,
            stash=self.stash,
            op=self.options.op,
            compacted=device == "cpu" if tokens is None else tokens.index is not None,
            copied=copied_rows(*self.parameters[::4], *self.parameters[3::4]),
        )

    @property
    def topk(self) -> TopK | None:
        """The teacher of which K entries are known, as rows."""
        if self.indices is None or self.values is None:
            return None
        k = self.indices.shape[-1]
        return TopK(self.indices.reshape(-1, k), self.values.reshape(-1, k), self.topk_kind, self.topk_rest)
