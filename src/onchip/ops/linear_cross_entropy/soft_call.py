"""Arguments of the operators in PyTorch for soft labels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onchip.frontend.torch_inputs import LOSS_DTYPES, leading_dimensions
from onchip.frontend.torch_labels import check_log_probs
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_call import Call
from onchip.vocab.torch import soft, tiles
from onchip.vocab.torch.tiles import Tokens


@dataclass(frozen=True)
class SoftCall(Call):
    """The arguments of the operators."""

    labels: Tensor  # [..., K], of the `ids`; dense [..., V], and the ids [...] mean nothing
    kind: str  # of these numbers: 'probs' or 'log_probs'
    dense: bool

    @property
    def of_op(self) -> dict[str, Any]:
        out = self.weight_grad_out is not None
        if self.dense:
            gathered = len(leading_dimensions(self.labels)) > 1
            return {"op": OP, "labels": LOSS_DTYPES[self.labels.dtype], "weight_grad_out": out, "gathered": gathered}
        weighed = self.class_weight is not None
        smoothing = self.options.label_smoothing
        of_ids = {"ids": self.several, "smoothing": smoothing, "class_weight": weighed}
        return {"op": OP, "weight_grad_out": out, "stats": self.options.return_stats, **of_ids}

    def tokens(self, *, check_values: bool, compact: bool = True) -> Tokens:
        """All of them; values are always checked on the CPU, unless kernels take them."""
        first, compact = (1, 0) if self.options.shift else (), compact and not self.kernels
        if self.kind == "log_probs" and (check_values or (compact and self.labels.device.type == "cpu")):
            check_log_probs(OP, "target", self.labels, first=first)
        chosen = tiles.select(
            OP, "target.indices", self.ids, self.number, self.vocab, self.token_temperature,
            ignore_index=None, temperature=self.options.temperature, dtype=self.dtype, check_values=check_values,
            first=first, compact=compact,
        )  # fmt: skip
        return tiles.weighed(
            OP, chosen, self.token_weight, self.options.reduction, self.normalizer, check_values=check_values
        )

    def probs(self, *, weighed: bool = True) -> Tensor:
        """[T, K]: times the weights of classes, unless without."""
        shape = self.number, self.several
        values, ids = self.labels.reshape(shape), self.ids.reshape(shape)
        return soft.labels_of(values, self.kind, ids, self.class_weight if weighed else None, self.dtype)
