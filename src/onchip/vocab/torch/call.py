"""The arguments that the operators of all losses of a linear layer share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import LOSS_DTYPES, accumulator
from onchip.frontend.torch_parallel import Shards
from onchip.vocab import memory
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.memory import Problem
from onchip.vocab.torch import labels
from onchip.vocab.torch.tiles import Ids, Projection


@dataclass(frozen=True)
class Layer:
    """A linear layer, and which of its gradients are wanted."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    dtype: torch.dtype  # of the products
    grads: tuple[bool, ...]  # of hidden, weight, bias

    @property
    def number(self) -> int:
        """T, the number of tokens."""
        return self.hidden.numel() // self.hidden.shape[-1]

    @property
    def vocab(self) -> int:
        """V, the range of ids."""
        return self.weight.shape[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The dtypes in which the gradients of hidden, weight and bias are returned."""
        return self.hidden.dtype, self.weight.dtype, (self.weight if self.bias is None else self.bias).dtype

    @property
    def flops(self) -> int:
        """Floating-point operations of one product: the logits of all tokens, or the gradient of hidden or of
        weight.
        """
        rows, hidden = self.weight.shape
        return 2 * self.number * hidden * rows

    @property
    def layer(self) -> Projection:
        """The layer, in the products' dtype."""
        return Projection.of(self.hidden, self.weight, self.bias, self.dtype)

    @property
    def device(self) -> str:
        """'cpu' or 'cuda', as plans know it."""
        return "cpu" if self.hidden.device.type == "cpu" else "cuda"

    def problem(self, device: str = "", **more: Any) -> Problem:
        """The problem that plans are made for; `more` are fields that the caller knows."""
        vocab, hidden = self.weight.shape
        return Problem(
            tokens=self.number,
            hidden=hidden,
            vocab=vocab,
            dtype=LOSS_DTYPES[self.dtype],
            hidden_dtype=LOSS_DTYPES[self.hidden.dtype],
            weight_dtype=LOSS_DTYPES[self.weight.dtype],
            device=device or self.device,
            grad_hidden=self.grads[0],
            grad_weight=self.grads[1],
            grad_bias=self.grads[2],
            **more,
        )


def gradient_flops(kept: Any, upstream: Sequence[Tensor | None], wanted: Sequence[bool]) -> int:
    """Floating-point operations of the gradients of hidden and weight, for a kept call."""
    flops: int = kept.call.flops * (wanted[0] + wanted[1])
    return flops


DIFFERENTIABLE = ("hidden", "weight", "bias")
OF_LAYER: dict[str, Any] = {
    "differentiable": DIFFERENTIABLE,
    "flops": attrgetter("flops"),
    "gradient_flops": gradient_flops,
}
"""What an operator that keeps its `LinearCall` registers: what has a gradient, and the operations of its products."""


@dataclass(frozen=True, kw_only=True)
class VocabCall:
    """What a loss asks about logits; an op adds its own options, and what follows from them.

    If the vocabulary is sharded over ranks, the logits or the layer and hidden states are this rank's; ids and
    everything else are for the whole vocabulary and all tokens.
    """

    ids: Tensor  # [...] or [..., K]
    token_temperature: Tensor | None  # [...] or []
    options: Any  # the op's own
    shards: Shards
    """This rank's part of the vocabulary; `WHOLE` if it has all."""
    kernels: bool
    """Whether Triton's kernels, which take ignored tokens too, run for logits that exist, or on ranks; False for a
    layer with a whole vocabulary."""
    labels: Tensor | None = None
    """As in `labels`; if every entry has a label, this rank has those of its part of the vocabulary."""
    kind: str = "ids"
    token_weight: Tensor | None = None  # [...]
    normalizer: Tensor | None = None  # []
    class_weight: Tensor | None = None  # [V] in the dtype of sums, contiguous; None where token_weight has it

    op: ClassVar[str]
    """The name that errors begin with."""
    given: ClassVar[Any]
    """[..., H] or [..., V]: the hidden states, or the logits."""
    vocab: ClassVar[Any]
    """V over all ranks, the range of ids."""
    number: ClassVar[Any]
    """T, over all ranks if each has the hidden states of some tokens."""
    of_op: ClassVar[Any]
    """A dictionary: the problem's fields that the op knows."""

    @property
    def dense(self) -> bool:
        """Whether every entry has a label."""
        return self.kind == "dense"

    @property
    def several(self) -> int:
        """K, the ids per token; 1 if ids have no dimension for it."""
        return self.ids.shape[-1] if self.ids.ndim == self.given.ndim else 1

    @property
    def leading(self) -> torch.Size:
        """The dimensions of all tokens."""
        return torch.Size(self.shards.whole_shape(self.given.shape)[:-1])

    def tokens(self, *, check_values: bool) -> Any:
        """Which tokens and ids count; values are always checked on the CPU, unless kernels run."""
        return labels.tokens(self.op, self, check_values=check_values, compact=not self.kernels)


@dataclass(frozen=True, kw_only=True)
class LinearCall(VocabCall, Layer):
    """The same about the logits of a linear layer."""

    copied: int
    """Bytes of the copies of inputs whose strides don't suit."""
    compiled: bool
    """Whether its sizes may have been symbols (of torch.compile) when it was made."""
    weight_grad_out: Tensor | None = None  # [V, H] in the dtype of sums; used in backward

    given = property(lambda self: self.hidden)
    of_kernels: ClassVar[Any] = {}
    """A dictionary: fields of the problem beside, where Triton's kernels run."""

    @property
    def vocab(self) -> int:
        return self.shards.vocab if self.shards.there else self.weight.shape[0]

    @property
    def number(self) -> int:
        return math.prod(self.ids.shape[: self.hidden.ndim - 1])  # (numel() of symbols is a number)

    @property
    def of_ranks(self) -> dict[str, Any]:
        """What is compared over ranks, as `require_agreement` takes it; and the sizes that all have in common."""
        return {"split": {"weight": self.weight}, "hidden": {"hidden": self.hidden}}

    @property
    def sizes(self) -> Any:
        """The sizes that all ranks must have in common."""
        return self.hidden.shape, self.hidden.dtype, self.weight.dtype

    @property
    def budget(self) -> int | None:
        """scratch_bytes as a number, also where it is a symbol."""
        scratch_bytes = self.options.scratch_bytes
        return None if scratch_bytes is None else int(scratch_bytes)

    @property
    def operand(self) -> torch.dtype:
        """The dtype of the logits' gradient, as the products read it.

        An empty shard has no products, and where other ranks run kernels their sums aren't scaled for float16.
        """
        return accumulator(self.dtype) if self.device == "cpu" or self._adds_nothing else self.dtype

    @property
    def _adds_nothing(self) -> bool:
        return self.kernels and self.shards.rows == 0

    def problem(self, device: str = "", **more: Any) -> Problem:
        """The problem, with what the call and its op know."""
        more = {**self.of_op, "sharded": self.shards.there, **more}
        return super().problem(device, softcap=self.options.softcap is not None, copied=self.copied, **more)

    def plan(self, strategy: str, tokens: Ids, **more: Any) -> ChunkConfig:
        """The plan for PyTorch's own products."""
        problem = self.problem(compacted=tokens.index is not None, **more)
        return memory.plan(problem, strategy, self.budget)

    def empty_gradients(self, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Memory for the gradients in their parameters' dtypes, not yet filled; None for one that is added to the
        caller's.
        """
        wanted = wanted[0], wanted[1] and self.weight_grad_out is None, wanted[2]
        return tuple(
            stated.empty_like(x) if x is not None and want else None
            for x, want in zip((self.hidden, self.weight, self.bias), wanted, strict=True)
        )
