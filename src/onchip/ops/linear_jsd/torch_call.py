"""The call that the public functions make, and what follows from its arguments."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import LOSS_DTYPES, accumulator, copied_rows, copied_weight
from onchip.frontend.torch_labels import check_log_probs
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Wanted
from onchip.ops.linear_jsd import JsdOptions
from onchip.ops.linear_jsd.memory import Head, JsdProblem
from onchip.vocab.torch import parallel
from onchip.vocab.torch.agreement import require_agreement
from onchip.vocab.torch.call import Layer
from onchip.vocab.torch.tiles import Tokens, divisor, select, weighed
from onchip.vocab.triton.setup import TritonSaved


def check_indices(op: str, indices: Tensor, kept: Tensor | None, vocab: int) -> None:
    """Raise if indices [..., K] of tokens that are `kept` [...] are out of range or repeated; reads their values."""
    name, ids = "teacher_topk.indices", indices.to(torch.int64)
    known = ids if kept is None else ids.masked_fill(~kept[..., None], 0)
    select(
        op, name, known, ids.shape[:-1].numel(), vocab, None, ignore_index=None, temperature=1.0, dtype=torch.float32,
        check_values=True,
    )  # fmt: skip
    ordered = ids.sort(-1).values
    same = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    same = same if kept is None else same & kept
    if bool(same.any()):
        raise ValueError(f"{op}: {name} must be distinct within a token; {int(same.sum())} are not")


class JsdModel(NamedTuple):
    """The student or the teacher: its last layer, or its logits.  Also the gradients of these."""

    hidden: Tensor | None = None  # [..., H]
    weight: Tensor | None = None  # [V, H]
    bias: Tensor | None = None  # [V]
    logits: Tensor | None = None  # [..., V]


PARAMETERS = tuple(f"{who}_{part}" for who in ("student", "teacher") for part in JsdModel._fields)
"""The tensors of a call that can have a gradient."""
NO_GRADIENTS = (False,) * len(PARAMETERS)


class Left(NamedTuple):
    """What the Triton kernels leave for backward; empty if nothing is needed."""

    stats: Tensor  # [STATS, T] float32, by position; with a top-k teacher K + 2 more
    vectors: Tensor  # int32: `Vectors.packed`
    student: TritonSaved
    teacher: TritonSaved


_SPLIT = ("weight", "logits")


class JsdCall(NamedTuple):
    """The arguments of every backend's operator; with a sharded vocabulary, this rank's."""

    student: JsdModel
    teacher: JsdModel  # empty where the teacher is a top-k, whose ids are of the whole vocabulary
    indices: Tensor | None  # [..., K], like `values`
    values: Tensor | None
    target: Tensor | None  # [...]
    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    dtypes: tuple[torch.dtype, ...]  # of both models' products
    shape: tuple[int, ...]  # [...], of all ranks
    size: int  # vocabulary entries that count; for a shard, its own
    topk_kind: str
    topk_rest: str
    options: JsdOptions
    stash: bool  # gradients are made in forward and kept
    grads: tuple[bool, ...]  # for each of `PARAMETERS`
    shards: Shards

    @property
    def models(self) -> tuple[JsdModel, JsdModel]:
        return self.student, self.teacher

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return *self.student, *self.teacher

    @property
    def first(self) -> Tensor:
        x = self.student.logits if self.student.hidden is None else self.student.hidden
        assert x is not None
        return x

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits, statistics and sums."""
        return accumulator(self.first.dtype)

    @property
    def number(self) -> int:
        """T."""
        return math.prod(self.shape)

    @property
    def vocab(self) -> int:
        """Vocabulary entries that count, on all ranks."""
        return self.shards.vocab if self.shards.there else self.size

    def of_all_tokens(self, *, fake: bool = False) -> "JsdCall":
        """The call with the hidden states of all ranks' tokens; in a `fake` call these aren't filled."""
        shards = self.shards
        if shards.sequence < 0:
            return self

        def whole(x: JsdModel) -> JsdModel:
            if x.hidden is None:
                return x
            if fake:
                return x._replace(hidden=x.hidden.new_empty(shards.whole_shape(x.hidden.shape)))
            return x._replace(hidden=parallel.whole_hidden(x.hidden, shards))

        return self._replace(student=whole(self.student), teacher=whole(self.teacher))

    def new_loss(self) -> Tensor:
        """Memory for the result."""
        shape = self.shape if self.options.reduction == "none" else ()
        return stated.empty(shape, self.dtype, self.first.device)

    def empty_gradients(self, wanted: Wanted, dtype: torch.dtype | None) -> list[Tensor | None]:
        """Memory for gradients, in `dtype` or by default in their parameters' dtypes."""
        pairs = zip(self.parameters, wanted, strict=True)
        return [stated.empty_like(x, dtype) if x is not None and want else None for x, want in pairs]

    def targets(self) -> tuple[Tensor, int]:
        """Targets [...] and the index that is ignored; without targets, ones that keep all tokens."""
        if self.target is None:
            return stated.zeros(self.shape, torch.int64, self.first.device), -1
        return self.target, self.options.ignore_index

    def tokens(self, *, check: bool, compact: bool = True) -> Tokens:
        """The tokens that count; with `check`, values are checked on the CPU, and elsewhere if check_inputs asks for
        it.  Without `compact` the CPU is a device like any other.
        """
        (target, ignore_index), options, op = self.targets(), self.options, self.options.op
        check_values = check and options.check_inputs
        chosen = select(
            op, "target", target, self.number, self.vocab, None,
            ignore_index=ignore_index, temperature=1.0, dtype=self.first.dtype, check_values=check_values,
            compact=compact,
        )  # fmt: skip
        tokens = weighed(op, chosen, self.token_weight, options.reduction, self.normalizer, check_values=check_values)
        if check and self.indices is not None and (options.check_inputs or self.indices.device.type == "cpu"):
            kept = None if self.target is None else target != ignore_index
            check_indices(op, self.indices, kept, self.vocab)
            if self.values is not None and self.topk_kind == "log_probs":
                check_log_probs(op, "teacher_topk", self.values, kept)
        return tokens

    def reduced(self, tokens: Tokens, losses: Tensor) -> Tensor:
        """The loss, from the computed tokens' losses without weights."""
        loss = tokens.spread(losses * tokens.weight, self.shape)
        return loss if self.options.reduction == "none" else loss.sum() * tokens.inverse_count

    def check_ranks(self) -> None:
        """On the CPU and with check_inputs: raise where ranks' arguments don't belong together."""
        if not self.shards.there:
            return
        names = ("student_", "teacher_")
        sizes = [(x.hidden.shape, x.hidden.dtype) for x in self.models if x.hidden is not None]
        split = {who + part: getattr(x, part) for who, x in zip(names, self.models, strict=True) for part in _SPLIT}
        require_agreement(
            self.options.op, self, (sizes, self.shape, self.topk_kind, self.topk_rest),
            self.target, self.token_weight, self.normalizer, self.indices, self.values,
            split=split, ids=self.target,
            hidden={f"{who}hidden": x.hidden for who, x in zip(names, self.models, strict=True)},
        )  # fmt: skip

    def divisor(self, kept: Tensor) -> Tensor:
        """The loss's divisor, 0-d, given which tokens are kept, or their number."""
        return divisor(self.options.op, self.options.reduction, self.normalizer, kept)

    def grads_of(self, who: int) -> tuple[bool, ...]:
        """Which of the student's (0) or the teacher's (1) parameters get a gradient."""
        return self.grads[4 * who : 4 * who + 4]

    def layer(self, who: int) -> Layer | None:
        """The layer as the engine takes it; None for a model that is given by its logits."""
        hidden, weight, bias, _ = self.models[who]
        if hidden is None or weight is None:
            return None
        grads = self.grads_of(who)[:3]
        return Layer(hidden, weight, bias, self.dtypes[who], grads)

    def flops(self, gradients: Wanted, *, logits: bool) -> int:
        """Operations of the matrix products for these gradients of `PARAMETERS`, and with `logits` for the logits."""
        hidden = [0 if x.hidden is None else x.hidden.shape[-1] for x in self.models]
        products = [logits + gradients[4 * who] + gradients[4 * who + 1] for who in (0, 1)]
        return sum(2 * self.number * self.size * h * times for h, times in zip(hidden, products, strict=True))

    def head(self, who: int, *, kernels: bool = False) -> Head:
        """What plans know about the student (0) or the teacher (1); `kernels`: for the Triton kernels."""
        hidden, weight, _, logits = self.models[who]
        copied = copied_rows(hidden)
        if kernels:
            copied += copied_rows(logits, columns_apart=False)
            copied += copied_weight(None if weight is None else weight[: self.size], self.dtypes[who])
        op, layer = self.options.op, self.layer(who)
        if layer is not None:
            problem: Head = layer.problem(op=op, copied=copied)
            return problem if self.shards.sequence < 0 else replace(problem, tokens=self.number)
        device, vocab = "cpu" if self.first.device.type == "cpu" else "cuda", 0 if logits is None else logits.shape[-1]
        dtype, grad = LOSS_DTYPES[self.first.dtype if logits is None else logits.dtype], self.grads_of(who)[3]
        return Head(
            self.number, 0, vocab, dtype, device=device, grad_hidden=grad, grad_weight=False, op=op, copied=copied
        )

    def problem(self, *, kernels: bool = False) -> JsdProblem:
        """The problem, for which plans are made."""
        student, teacher = (self.head(who, kernels=kernels) for who in (0, 1))
        topk, shards, sent = 0 if self.indices is None else self.indices.shape[-1], self.shards, 0
        size = self.size
        if shards.there:
            # Ranks exchange numbers chunk by chunk, so that each makes the plan of the one with the most entries.
            size = shards.most or shards.vocab
            student, teacher = (replace(h, vocab=size) if h.vocab else h for h in (student, teacher))
            mine, dim = self.first, shards.sequence
            if dim >= 0:
                mine = mine.narrow(dim, 0, self.shape[dim] // shards.ranks)
            sent = parallel.sent_bytes(self.number, max(1, topk), shards, mine)
        return JsdProblem(size, student, teacher, topk, self.options.hard_weight > 0, self.stash, sent)
