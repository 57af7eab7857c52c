"""What the registered operators of every PyTorch backend take: one list of arguments, and what is read off it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import DTYPES, copied_rows
from onchip.ops.linear_jsd.memory import Head, Problem
from onchip.ops.linear_jsd.torch_inputs import check_indices
from onchip.ops.linear_jsd.torch_rows import Loss
from onchip.ops.linear_jsd.torch_walk import Model
from onchip.vocab.torch.tiles import Tokens, select_tokens

PARTS = ("hidden", "weight", "bias", "logits")
# The arguments of the operators; `Arguments` gives them their shapes and Python names, in the same order.
# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
SCHEMA = (
    ", ".join(f"Tensor? {who}_{part}" for who in ("student", "teacher") for part in PARTS)
    + ", Tensor? indices, Tensor? values, Tensor? target, Tensor? token_weight, Tensor? normalizer, "
    "ScalarType student_dtype, ScalarType teacher_dtype, str op, SymInt[] shape, SymInt size, "
    "str topk_kind, str topk_rest, float beta, float temperature, bool temperature_squared, int ignore_index, "
    "str reduction, float hard_weight, bool check_inputs, int? scratch_bytes, bool stash, bool[] grads"
)


class Arguments(NamedTuple):
    """The arguments of a forward operator, in order."""

    student_hidden: Tensor | None  # [..., Hs]
    student_weight: Tensor | None  # [V, Hs]
    student_bias: Tensor | None  # [V]
    student_logits: Tensor | None  # [..., V]
    teacher_hidden: Tensor | None
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    teacher_logits: Tensor | None
    indices: Tensor | None  # [..., K]
    values: Tensor | None  # [..., K]
    target: Tensor | None  # [...]
    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    student_dtype: torch.dtype
    teacher_dtype: torch.dtype
    op: str
    shape: list[int]  # [...]
    size: int  # vocabulary entries that count
    topk_kind: str
    topk_rest: str
    beta: float
    temperature: float
    temperature_squared: bool
    ignore_index: int
    reduction: str
    hard_weight: float
    check_inputs: bool
    scratch_bytes: int | None
    stash: bool
    grads: list[bool]  # of the first eight

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self[:8]

    @property
    def first(self) -> Tensor:
        x = self.student_logits if self.student_hidden is None else self.student_hidden
        assert x is not None
        return x

    @property
    def tokens_in_all(self) -> int:
        total = 1
        for n in self.shape:
            total *= n
        return total

    def tokens(self, *, check: bool) -> Tokens:
        """Those that count; with `check`, values are checked on the CPU, and elsewhere where that was asked for."""
        target, ignore_index = self.target, self.ignore_index
        if target is None:
            target, ignore_index = torch.zeros(self.shape, dtype=torch.int64, device=self.first.device), -1
        tokens = select_tokens(
            self.op,
            target,
            self.size,
            self.token_weight,
            None,
            self.normalizer,
            ignore_index=ignore_index,
            reduction=self.reduction,
            temperature=1.0,
            check_values=check and self.check_inputs,
        )
        if check and self.indices is not None and (self.check_inputs or self.indices.device.type == "cpu"):
            check_indices(self.op, self.indices, None if self.target is None else target != ignore_index, self.size)
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
            hard=self.hard_weight > 0,
            device=device,
            stash=self.stash,
            op=self.op,
            compacted=device == "cpu" if tokens is None else tokens.index is not None,
            copied=copied_rows(*self.parameters[::4], *self.parameters[3::4]),
        )

    @property
    def loss(self) -> Loss:
        return Loss(
            self.beta,
            self.temperature,
            self.temperature_squared,
            self.hard_weight,
            self.topk_kind,
            self.topk_rest,
        )


TENSORS = 13  # of `Arguments`
