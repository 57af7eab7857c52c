"""Arguments of losses whose vocabulary is sharded over the ranks of a process group, as under tensor parallelism.

Rank r holds rows [start, start + rows) of the weight, or columns of logits.  `Sharding` holds the caller's arguments;
`localized` checks them, takes DTensors apart and turns them into `Shards`, which operators take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from onchip.frontend.options import Shapes, require_bool, require_int, require_one_of, require_positive_int
from onchip.frontend.torch_inputs import is_dtensor, require_tensor
from onchip.frontend.torch_refusals import others_wait

HiddenLayout = Literal["replicated", "sequence"]


class OfShardedLogits(TypedDict, total=False):
    """What every loss takes by keyword where its vocabulary is sharded."""

    vocab_group: ProcessGroup | None
    vocab_start: int | None
    vocab_size: int | None


class OfShards(OfShardedLogits, total=False):
    """With hidden states."""

    hidden_layout: HiddenLayout
    reduce_hidden_grad: bool


@dataclass(frozen=True)
class Sharding:
    """The arguments of a caller, as they are named."""

    vocab_group: Any = None
    vocab_start: Any = None
    vocab_size: Any = None
    hidden_layout: Any = "replicated"
    reduce_hidden_grad: Any = True

    def there(self, tensors: Mapping[str, Any]) -> bool:
        """Whether something is sharded, or said of it: one of the arguments is given, or a tensor is a DTensor."""
        return self.said or any(isinstance(x, Tensor) and is_dtensor(x) for x in tensors.values())

    @property
    def said(self) -> bool:
        """Whether one of the arguments is given; 1 is no True."""
        return self != NOTHING or self.reduce_hidden_grad is not True

    def check(self, op: str) -> None:
        """Raise for one of the wrong type or range."""
        if self.vocab_group is not None and not isinstance(self.vocab_group, ProcessGroup):
            remedy = ""
            if hasattr(self.vocab_group, "get_group"):
                remedy = "; pass mesh.get_group('tp'), the group of one dimension"
            elif self.vocab_group is dist.GroupMember.NON_GROUP_MEMBER:
                remedy = "; this rank is no member of the group and must not call the loss"
            raise TypeError(
                f"{op}: vocab_group must be a torch.distributed.ProcessGroup; got "
                f"{type(self.vocab_group).__name__}{remedy}"
            )
        if self.vocab_start is not None:
            require_int(op, "vocab_start", self.vocab_start)
            if self.vocab_start < 0:
                raise ValueError(f"{op}: vocab_start must be 0 or more; got {self.vocab_start}")
            if self.vocab_size is None:
                raise ValueError(f"{op}: vocab_start needs vocab_size, the whole vocabulary's; pass both")
        require_positive_int(op, "vocab_size", self.vocab_size)
        require_one_of(op, "hidden_layout", self.hidden_layout, get_args(HiddenLayout))
        require_bool(op, "reduce_hidden_grad", self.reduce_hidden_grad)
        if self.hidden_layout == "sequence" and not self.reduce_hidden_grad:
            raise ValueError(
                f"{op}: hidden_layout='sequence' returns the gradient of this rank's tokens, which is a sum over "
                "ranks; pass reduce_hidden_grad=True"
            )


NOTHING = Sharding()


@dataclass(frozen=True)
class Shards:
    """This rank's part of a vocabulary, and what the others have of hidden, as operators take it."""

    group: str  # the name of the process group; empty: there is none, and this rank has all
    ranks: int
    start: int  # of the vocabulary: this rank's first row
    rows: int  # that are of the vocabulary: those after them are padding
    vocab: int  # of all ranks, without padding
    sequence: int  # the dimension of hidden whose tokens are sharded; -1: every rank has all
    reduce: bool  # hidden's gradient, over the ranks
    most: int  # rows of each rank but the last ones, which have no more, where all know so and all have some; else 0
    stated: bool = True  # the call says which rows this rank has; else they might be the whole vocabulary

    @property
    def there(self) -> bool:
        """Whether anything is sharded."""
        return self.group != ""

    def whole(self, shapes: Shapes, weights: Sequence[str], hidden: Sequence[str] = (), dim: int = 0) -> dict[str, Any]:
        """The shapes of all ranks' tensors, given this one's: of `weights`, sharded in this dimension, and of `hidden`
        states."""
        made: dict[str, Any] = dict(shapes)
        for name in weights:
            if name in made:
                made[name] = _with(made[name], dim, self.vocab)
        return made | {name: self.whole_shape(made[name]) for name in hidden}

    def whole_shape(self, hidden: Sequence[int]) -> tuple[int, ...]:
        """Of all tokens' hidden states, given that of this rank's."""
        if self.sequence < 0:
            return tuple(hidden)
        return _with(hidden, self.sequence, hidden[self.sequence] * self.ranks)


WHOLE = Shards("", 1, 0, 0, 0, -1, False, 0)
"""What a call of a whole vocabulary has in place of a rank's part."""


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    changed = list(shape)
    changed[dim] = size
    return tuple(changed)


class Localized(NamedTuple):
    """What a loss goes on with."""

    tensors: dict[str, Any]  # this rank's, by name
    shards: Shards | None  # None: nothing is sharded


def localized(
    op: str,
    sharding: Sharding,
    weights: Mapping[str, Any],  # by name: what is sharded
    hidden: Mapping[str, Any],  # by name: hidden states, if there are any
    *,
    tokens: Any = None,  # an argument with a number for each of all tokens: the dimensions before hidden's last
    last: Sequence[str] = (),  # those of `weights` that are sharded in their last dimension, not in their first
) -> Localized:
    """This rank's tensors, and which part they are; raises for a sharding that the losses can't compute."""
    given = {**hidden, **weights}
    tensors: dict[str, Any] = dict(given)
    dtensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and is_dtensor(x)}
    if sharding.vocab_group is None and not dtensors:
        if sharding.said:
            sharding.check(op)
            raise ValueError(
                f"{op}: vocab_start, vocab_size, hidden_layout and reduce_hidden_grad are only for a sharded "
                "vocabulary; pass its vocab_group"
            )
        return Localized(tensors, None)
    sharding.check(op)
    if sharding.vocab_group is None:
        for name, x in given.items():
            if x is not None and name not in dtensors:  # whose ranks may have other tokens, as with FSDP2
                other = next(iter(dtensors))
                raise TypeError(
                    f"{op}: {other} is a DTensor; pass {other}.full_tensor(), or {other}.to_local() if that is all "
                    "this rank needs; under FSDP2, call the op inside the forward of the module that holds it, where "
                    f"it is a plain tensor; under tensor parallelism pass vocab_group too, or {name} as a DTensor"
                )
    first = next(iter(weights))
    group = sharding.vocab_group
    for name, x in dtensors.items():
        group = _group_of(op, name, x, group)
    assert group is not None
    there = next((x for x in given.values() if isinstance(x, Tensor)), None)
    if there is not None:
        others_wait(group, there)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = []
    for name, x in weights.items():
        if x is None:
            continue
        dim = -1 if name in last else 0
        if name in dtensors:
            tensors[name] = _local_weight(op, name, x, dim)
        else:
            require_tensor(op, name, x)
        if tensors[name].ndim == 0:
            raise ValueError(f"{op}: {name} has no dimension that could be sharded; got shape []")
        sizes.append((name, tensors[name].shape[dim], x.shape[dim] if name in dtensors else None))
    for name, size, _ in sizes[1:]:
        if size != sizes[0][1]:
            raise ValueError(
                f"{op}: {name} has {size} of the vocabulary's entries but {first} has {sizes[0][1]}; each rank passes "
                "its part of both"
            )
    start, vocab, most = _place(op, sharding, first, sizes[0][1], rank, ranks, sizes[0][2])
    rows = max(0, min(sizes[0][1], vocab - start))
    sequence = -1
    for name, x in hidden.items():
        if name in dtensors:
            tensors[name], at = _local_hidden(op, name, x, sharding.reduce_hidden_grad)
            if sharding.hidden_layout == "sequence" and at < 0:
                raise ValueError(f"{op}: hidden_layout='sequence', but {name} is a DTensor that is replicated")
        else:
            require_tensor(op, name, x)
            at = -1 if sharding.hidden_layout == "replicated" else _sequence_dim(op, name, x, tokens, ranks)
        if name != next(iter(hidden)) and at != sequence:
            raise ValueError(f"{op}: {name} must be laid out like {next(iter(hidden))}; redistribute one of them")
        sequence = at
    # An empty shard lies at the end, wherever it is said to.
    start = start if rows else vocab
    most = most if (ranks - 1) * most < vocab else 0
    size = sizes[0][1]
    stated = first in dtensors or sharding.vocab_start is not None or (sharding.vocab_size is not None and size < vocab)
    made = Shards(group.group_name, ranks, start, rows, vocab, sequence, sharding.reduce_hidden_grad, most, stated)
    return Localized(tensors, made)


def _place(
    op: str, sharding: Sharding, name: str, rows: int, rank: int, ranks: int, whole: int | None
) -> tuple[int, int, int]:
    """The first row of this rank, the size of the vocabulary, and how far the ranks' first rows lie apart (0: not
    evenly), given how many rows this rank and, if that is known, all ranks have."""
    vocab: int = whole or ranks * rows if sharding.vocab_size is None else sharding.vocab_size
    if sharding.vocab_start is not None:
        return sharding.vocab_start, vocab, 0
    if whole is not None:
        if vocab > whole:
            raise ValueError(f"{op}: vocab_size={vocab}, but {name} has {whole} rows")
        each = -(-whole // ranks)
        return min(whole, rank * each), vocab, each
    chunk = -(-vocab // ranks)
    expected = max(0, min(chunk, vocab - rank * chunk))
    if rows == expected:
        return rank * chunk, vocab, chunk
    if rows >= chunk:  # all ranks have so many, some of them padding
        return rank * rows, vocab, rows
    raise ValueError(
        f"{op}: {name} has {rows} of the vocabulary's entries on rank {rank} of {ranks}, where torch.chunk puts "
        f"{expected} of vocab_size={vocab}; pass vocab_start, the first one's index"
    )


def _group_of(op: str, name: str, x: Any, group: ProcessGroup | None) -> ProcessGroup:
    """The group over which DTensor `x` is sharded, which must be `group` if that is given."""
    mesh = x.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"{op}: {name} is a DTensor on a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}; pass one on only "
            f"the dimension of tensor parallelism, mesh['tp'], or {name}.to_local() with vocab_group="
            "mesh.get_group('tp')"
        )
    of_mesh: ProcessGroup = mesh.get_group()
    if group is None:
        return of_mesh
    if of_mesh.group_name != group.group_name:  # equal meshes may have groups of their own
        ranks, others = dist.get_process_group_ranks(of_mesh), dist.get_process_group_ranks(group)
        if ranks != others:
            raise ValueError(
                f"{op}: {name} is a DTensor on a process group of ranks {ranks}, and vocab_group, or another argument, "
                f"has ranks {others}; pass all on the same ranks in the same order"
            )
    return group


def _local_weight(op: str, name: str, x: Any, dim: int) -> Tensor:
    (placement,) = x.placements
    dim %= x.ndim
    if not placement.is_shard(dim) or type(placement).__name__ != "Shard":
        raise ValueError(
            f"{op}: {name} is a DTensor with placement {placement}, but must be Shard({dim}), the vocabulary's "
            f"dimension: pass {name}.full_tensor() and all else as plain tensors, or "
            f"{name}.redistribute(placements=[Shard({dim})])"
        )
    local: Tensor = x.to_local()
    return local


def _local_hidden(op: str, name: str, x: Any, reduce: bool) -> tuple[Tensor, int]:
    """This rank's hidden states and the dimension in which their tokens are sharded."""
    from torch.distributed.tensor import Partial, Replicate

    (placement,) = x.placements
    if placement.is_replicate():
        local: Tensor = x.to_local(grad_placements=[Replicate() if reduce else Partial()])
        return local, -1
    dim = next((d for d in range(x.ndim - 1) if placement.is_shard(d)), -1)
    if dim < 0 or type(placement).__name__ != "Shard":
        raise ValueError(
            f"{op}: {name} is a DTensor with placement {placement}; it must be Replicate(), or Shard of a dimension of "
            f"tokens: {name}.redistribute(placements=[Replicate()])"
        )
    if x.shape[dim] % x.device_mesh.size():
        raise ValueError(
            f"{op}: {name} has {x.shape[dim]} tokens in dimension {dim}, sharded over {x.device_mesh.size()} ranks; "
            "pad it to a multiple, with ignored targets"
        )
    if not reduce:
        raise ValueError(
            f"{op}: {name} is sharded by tokens, so its gradient is a sum over ranks; pass reduce_hidden_grad=True"
        )
    return x.to_local(), dim


def _sequence_dim(op: str, name: str, x: Tensor, tokens: Any, ranks: int) -> int:
    """The dimension of hidden states that has 1 / `ranks` of the tokens."""
    leading = x.shape[:-1]
    if ranks == 1 or not isinstance(tokens, Tensor):
        return 0
    whole = tokens.shape[: len(leading)]
    found = [
        d
        for d in range(min(len(leading), len(whole)))
        if (*leading[:d], ranks * leading[d], *leading[d + 1 :]) == tuple(whole)
    ]
    if not found:
        raise ValueError(
            f"{op}: {name} has shape {list(x.shape)}, but hidden_layout='sequence' with {ranks} ranks needs one of "
            f"{ranks} equal parts of all tokens, whose shape is {list(whole)}, in one dimension"
        )
    return found[0]
