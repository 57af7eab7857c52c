"""torchtitan 0.3: its loss through `linear_cross_entropy`, its linear layers through `fp8_linear`, its experts through
`grouped_matmul`, its attention through `attention`.

`LinearCrossEntropyLoss.Config` goes where a trainer's config has `ChunkedLossWrapper.Config`;
`Fp8LinearConverter.Config` goes where it has `Float8LinearConverter.Config`; `GroupedMatmulConverter.Config` goes where
it has `MXFP8GroupedExpertsConverter.Config`; `AttentionConverter.Config` goes among the converters too.
"""

# ruff: noqa: E402
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from onchip.attention.masks import Documents, Window
from onchip.core.backends import choose_backend
from onchip.frontend.torch_inputs import dtype_name, is_dtensor
from onchip.integrations.head_options import HeadOptions
from onchip.integrations.versions import require
from onchip.ops.attention.torch_op import BACKENDS as ATTENTION_BACKENDS
from onchip.ops.grouped_matmul.torch_op import BACKENDS
from onchip.torch import Fp8Linear, attention, grouped_matmul, linear_cross_entropy
from onchip.torch import LinearCrossEntropyLoss as Options

require("torchtitan", "torchtitan", "0.3")

import spmd_types as spmd
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

NAME = "onchip.integrations.torchtitan"


class LinearCrossEntropyLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """torchtitan's cross-entropy of lm_head's logits, by `linear_cross_entropy`: in one call, without storing them.

    The loss is the sum over tokens, divided by the global number of valid tokens, as `ChunkedLossWrapper` with
    `CrossEntropyLoss` computes it; in 16 bits it doesn't round the logits.  The trainer passes it the model's lm_head,
    which is called as a module once for each batch, so that FSDP2 gathers its weight and reduces its gradient as usual.
    Under tensor parallelism each rank computes its rows of the vocabulary.  There are no chunks to choose:
    scratch_bytes bounds the memory.  `compile.components` with "loss" changes nothing.

    Args:
        config: `Config`, whose fields are arguments of `linear_cross_entropy`: terms of the loss, such as
            label_smoothing, and scratch_bytes, backend and precision.

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range, or what `linear_cross_entropy` raises.

    Memory: that of `linear_cross_entropy`, and 4 * B * L * D bytes for torchtitan's float32 copy of hidden's gradient.

    Example, in a function of a config registry::

        from onchip.integrations.torchtitan import LinearCrossEntropyLoss

        config = llama3_8b()
        config.loss = LinearCrossEntropyLoss.Config()

    Source: torchtitan 0.3.0, `torchtitan/components/loss.py`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HeadOptions, BaseLoss.Config):  # type: ignore[misc]
        """`HeadOptions`, and none of ChunkedLossWrapper's fields: there are no chunks, and no other loss inside."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.options = {f.name: getattr(config, f.name) for f in fields(config)}
        Options(**self.options)  # checks them
        self.num_chunks = 1
        self.loss_fn = _divided
        self.lm_head: Any = None
        self._labels: Tensor | None = None  # of the call that runs

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Take the model's head, whose forward gives the loss while this loss is computed.  The trainer calls this.

        Raises:
            TypeError: lm_head isn't a linear layer, or has another class's forward: a softcap, a LoRA adapter, FP8.
        """
        own = vars(lm_head).get("forward")
        if not isinstance(lm_head, nn.Linear) or type(lm_head).forward is not nn.Linear.forward:
            raise TypeError(
                f"{NAME}: lm_head is a {type(lm_head).__name__}, whose logits may be more than a linear layer's; "
                "use torchtitan's ChunkedLossWrapper, or leave lm_head out of LoRA and FP8 converters"
            )
        # torchtitan's parallelize wraps a forward to reshard for tensor parallelism.
        if own is not None and own.__module__ != "torchtitan.protocols.module":
            raise TypeError(
                f"{NAME}: lm_head has a forward of its own, by {own.__module__}; use torchtitan's ChunkedLossWrapper"
            )
        logits = lm_head.forward

        def forward(input: Tensor) -> Tensor:
            if self._labels is None:
                return logits(input)
            loss: Tensor = linear_cross_entropy(
                input,
                lm_head.weight,
                self._labels,
                lm_head.bias,
                ignore_index=IGNORE_INDEX,
                reduction="sum",
                **self.options,
                **_sharding_of(lm_head),
            )
            return loss

        # Not the module: FSDP2's hooks of its call stay around it.
        vars(lm_head)["forward"] = forward
        self.lm_head = lm_head

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and an empty dict of metrics.

        Args:
            pred: [B, L, D] hidden states of this rank, from the model without its head.
            labels: [B, L], the token that each position is to predict, or -100.
            global_valid_tokens: the divisor of the sum; None for no division.
            positions: unused, as in torchtitan's CrossEntropyLoss.

        Raises:
            RuntimeError: `set_lm_head` hasn't been called, `spmd_backend` is 'full_dtensor', or
                `debug.spmd_typechecking` is on.
            ValueError: shapes are wrong.
        """
        if self.lm_head is None:
            raise RuntimeError(f"{NAME}: there is no lm_head yet; call set_lm_head(model.lm_head), as the trainer does")
        if is_dtensor(labels):  # and hidden states too, on a mesh of all dimensions
            raise RuntimeError(
                f"{NAME}: labels are a DTensor, as with spmd_backend 'full_dtensor'; set parallelism.spmd_backend to "
                "'spmd_types' or 'partial_dtensor', or use torchtitan's ChunkedLossWrapper"
            )
        if spmd.is_type_checking():
            raise RuntimeError(f"{NAME}: this loss doesn't support SPMD types; set debug.spmd_typechecking to False")
        if pred.ndim != 3 or pred.shape[:-1] != labels.shape:
            raise ValueError(
                f"{NAME}: hidden states are {list(pred.shape)} and labels are {list(labels.shape)}; they must be "
                "[B, L, D] and [B, L]"
            )
        self._labels = labels
        try:
            # torchtitan's loop with one chunk: it gathers the head for FSDP2, runs the head's backward here, and hands
            # its gradient to the model's backward.
            loss, metrics = super().__call__(pred, labels, global_valid_tokens)
        finally:
            self._labels = None
        return loss, metrics


def _divided(loss: Tensor, labels: Tensor, global_valid_tokens: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """What torchtitan's loop asks for, of the head's output, which is the loss already."""
    if loss.dtype != torch.float32:
        raise RuntimeError(
            f"{NAME}: FSDP2 casts the loss to {dtype_name(loss.dtype)}; leave output_dtype of lm_head's "
            "MixedPrecisionPolicy at None"
        )
    return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


def _whole(layer: Any) -> bool:
    """Whether tensor parallelism leaves the weight whole."""
    return not is_dtensor(layer.weight) and layer.weight.shape == (layer.out_features, layer.in_features)


def _sharding_of(head: Any) -> dict[str, Any]:
    """Arguments of `linear_cross_entropy` for a head's rows; with 'partial_dtensor', DTensors say it themselves."""
    if is_dtensor(head.weight) or _whole(head):
        return {}
    mesh = current_spmd_mesh()
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
        raise RuntimeError(
            f"{NAME}: the weight of lm_head is {list(head.weight.shape)} of [{head.out_features}, {head.in_features}], "
            "but torchtitan has no mesh with a dimension 'tp'; use torchtitan's ChunkedLossWrapper"
        )
    # Hidden states are replicated ("R"), whose gradient is a sum that torchtitan takes ("P").
    return {"vocab_group": mesh.get_group("tp"), "vocab_size": head.out_features, "reduce_hidden_grad": False}


def _require_whole(what: str, layer: Any) -> None:
    """Raise for a weight that tensor parallelism shards."""
    if not _whole(layer):
        whole = layer.out_features, layer.in_features
        raise RuntimeError(
            f"{NAME}: the weight of {what} is {list(whole)} and sharded here, as by tensor parallelism, which onchip's "
            "layer doesn't support; set parallelism.tensor_parallel_degree to 1, or use torchtitan's own"
        )


class TitanFp8Linear(Fp8Linear, Module):  # type: ignore[misc]
    """`onchip.torch.Fp8Linear` as a module of torchtitan's, which `Fp8LinearConverter` makes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """torchtitan's config of a linear layer, with options of `fp8_linear`."""

        grad_dtype: str = "e4m3"
        scale: str = "float32"
        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        # `Fp8Linear` checks the words.
        options: Any = {"grad_dtype": config.grad_dtype, "scale": config.scale, "backend": config.backend}
        super().__init__(config.in_features, config.out_features, bias=config.bias, **options)

    def forward(self, input: Any) -> Tensor:
        """The layer's output, as of `Fp8Linear`; raises for a shard of the weight."""
        _require_whole("a linear layer in FP8", self)
        return super().forward(input)


class Fp8LinearConverter(ModelConfigConverter):  # type: ignore[misc]
    """Replace each plain `Linear` of a model by an `onchip.torch.Fp8Linear`, like torchtitan's Float8LinearConverter.

    These layers stay as they are: those whose name contains one of filter_fqns, subclasses of `Linear`, whose forward
    may do more, and layers with a size that isn't a multiple of 16.  Parameters, their names and checkpoints stay the
    same.  Under tensor parallelism the layers raise.

    Args:
        config: `Config`.

    Raises:
        ValueError: there is no layer to convert, or an option is out of range.

    Example, in a function of a config registry::

        from onchip.integrations.torchtitan import Fp8LinearConverter

        config.model_spec = model_registry("8B", converters=[Fp8LinearConverter.Config()])

    Source: torchtitan 0.3.0, `torchtitan/components/quantization/float8.py`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """What to leave out, and options of `fp8_linear`."""

        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head", "router"])
        grad_dtype: str = "e4m3"
        scale: str = "float32"
        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        self.config = config
        options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "filter_fqns"}
        Fp8Linear(16, 16, device="meta", **options)  # which checks them

    def convert(self, model_config: Any) -> Any:
        """The model's config with FP8 layers.  It is changed in place, unless it is itself a Linear's."""
        config, converted = self.config, 0
        for name, linear, parent, attribute in list(model_config.traverse(Linear.Config)):
            sides = linear.in_features, linear.out_features
            if type(linear) is not Linear.Config or any(side % 16 for side in sides):
                continue
            if any(part in name for part in config.filter_fqns):
                continue
            layer = {f.name: getattr(linear, f.name) for f in fields(linear)}
            made = TitanFp8Linear.Config(
                **layer, grad_dtype=config.grad_dtype, scale=config.scale, backend=config.backend
            )
            converted += 1
            model_config = _put(made, parent, attribute, model_config)
        if not converted:
            raise ValueError(f"{NAME}: no Linear of the model is left to convert; filter_fqns is {config.filter_fqns}")
        return model_config


def _put(made: Any, parent: Any, attribute: Any, model_config: Any) -> Any:
    """Put the config `made` where `traverse` found another one; returns the config of the model."""
    if parent is None:
        return made
    if isinstance(parent, list):
        parent[attribute] = made
    else:
        setattr(parent, attribute, made)
    return model_config


class GroupedMatmulConverter(ModelConfigConverter):  # type: ignore[misc]
    """Compute the products of a model's experts by `grouped_matmul`, in place of `torch._grouped_mm`.

    It overrides `_grouped_mm` of each `GroupedExperts` and of subclasses, such as gpt-oss's; everything else, including
    parameters and checkpoints, stays the same.  Weights are read in place, and rows past the last expert's are 0 in
    results and gradients.  Experts whose products are replaced already, such as quantised ones, stay as they are.

    Args:
        config: `Config`.

    Raises:
        ValueError: there are no experts to convert, or no such backend.
        RuntimeError: in the experts' forward, with `debug.spmd_typechecking`.

    Example, in a function of a config registry::

        from onchip.integrations.torchtitan import GroupedMatmulConverter

        config.model_spec = model_registry("debugmodel", converters=[GroupedMatmulConverter.Config()])

    Source: torchtitan 0.3.0, `torchtitan/models/common/moe.py`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """Which backend of `grouped_matmul`."""

        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        choose_backend(NAME, config.backend, dict.fromkeys(BACKENDS))
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The model's config with such experts.  It is changed in place, unless it is itself the experts'."""
        converted = 0
        for _, experts, parent, attribute in list(model_config.traverse(GroupedExperts.Config)):
            owner = type(experts)._owner
            theirs = owner._grouped_mm is GroupedExperts._grouped_mm
            if not theirs or owner.__module__.startswith("torchtitan.components.quantization"):
                continue
            given = {f.name: getattr(experts, f.name) for f in fields(experts)}
            made = _experts_class(owner).Config(**given, onchip_backend=self.config.backend)
            converted += 1
            model_config = _put(made, parent, attribute, model_config)
        if not converted:
            raise ValueError(f"{NAME}: no GroupedExperts of the model are left to convert")
        return model_config


@cache
def _experts_class(owner: Any) -> Any:
    """A subclass of torchtitan's experts that computes their products by `grouped_matmul`."""

    class OnchipExperts(owner):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(owner.Config):  # type: ignore[misc]
            onchip_backend: str = "auto"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.onchip_backend = config.onchip_backend

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            """The grouped product [R, N] of A [R, K] and B_t [E, K, N]."""
            if spmd.is_type_checking():
                raise RuntimeError(
                    f"{NAME}: grouped_matmul doesn't support SPMD types; set debug.spmd_typechecking to False"
                )
            backend: Any = self.onchip_backend
            return grouped_matmul(A, B_t, group_offsets=offs, weight_layout="gkn", backend=backend)

    OnchipExperts.__name__ = OnchipExperts.__qualname__ = f"Onchip{owner.__name__}"
    return OnchipExperts


class OnchipAttention(VarlenAttention):  # type: ignore[misc]
    """torchtitan's attention for packed documents, by `attention`; `AttentionConverter` makes it."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):  # type: ignore[misc]
        """torchtitan's config, whose window_size is -1 on a side without limit, with a backend of `attention`."""

        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention's own loads flash-attention
        self.window_size, self.backend = config.window_size, config.backend

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """[B, L, N, H] of q's dtype, or what out_transform makes of it and of the log-sum-exp [B, L, N].

        Args:
            q_BLNH: [B, L, N, H]; v's heads may be of another size.
            k_BLNH: [B, L, K, H], with N a multiple of K.
            v_BLNH: as k.
            attention_masks: torchtitan's `VarlenMetadata`, for documents that begin at cu_seq_q among B * L tokens.  No
                document continues in the next row.
            scale: factor of the products; None: 1 / sqrt(H).
            out_transform: a function of the output and the log-sum-exp, as for gpt-oss's sinks.
            enable_gqa: not used: K says it.
            others: refused.

        Raises:
            TypeError: another mask, such as a `BlockMask`, or another argument.
            ValueError: queries and keys of different lengths; what `attention` raises.
            RuntimeError: with `debug.spmd_typechecking`.
        """
        if others:
            raise TypeError(f"{NAME}: attention has no {', '.join(others)}; leave AttentionConverter out")
        ends, of_keys = getattr(attention_masks, "cu_seq_q", None), getattr(attention_masks, "cu_seq_k", None)
        if ends is None or of_keys is None:
            raise TypeError(
                f"{NAME}: attention_masks is a {type(attention_masks).__name__}, and must be a VarlenMetadata; build "
                "the model with attn_backend='varlen', or leave AttentionConverter out"
            )
        if spmd.is_type_checking():
            raise RuntimeError(f"{NAME}: attention has no SPMD types; set debug.spmd_typechecking to False")
        batch, tokens = q_BLNH.shape[:2]
        if k_BLNH.shape[:2] != (batch, tokens) or ends.shape != of_keys.shape:
            raise ValueError(
                f"{NAME}: queries are {list(q_BLNH.shape)} and keys {list(k_BLNH.shape)}, and must be the same tokens; "
                "leave AttentionConverter out"
            )
        # The tokens before the first document are one too.
        packed = Documents.from_cu_seqlens(nn.functional.pad(ends, (1, 0)), batch * tokens)
        left, right = (None if side < 0 else side for side in self.window_size)
        mask = Documents(packed.ids.reshape(batch, tokens), packed.padding) & Window(left, right)
        backend: Any = self.backend
        out, lse = attention(q_BLNH, k_BLNH, v_BLNH, mask, scale=scale, return_lse=True, backend=backend)
        return out if out_transform is None else out_transform(out, lse)


class AttentionConverter(ModelConfigConverter):  # type: ignore[misc]
    """Compute a model's attention by `attention`, in place of `varlen_attn`.

    It replaces each `VarlenAttention`, so build the model with attn_backend="varlen": then torchtitan's masks of packed
    documents, its causal windows and gpt-oss's sinks are computed as they are.  `FlexAttention` stays, since its masks
    are functions.  torchtitan's varlen casts to bfloat16; onchip computes in the dtype that queries have.

    Args:
        config: `Config`.

    Raises:
        ValueError: no VarlenAttention is left to convert, or there is no such backend.

    Memory: that of `attention`.  Selective activation checkpointing computes it again in backward.

    Example, in a function of a config registry::

        from onchip.integrations.torchtitan import AttentionConverter

        config.model_spec = model_registry("8B", attn_backend="varlen", converters=[AttentionConverter.Config()])

    Source: torchtitan 0.3.0, `torchtitan/models/common/attention.py`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """Which backend of `attention`."""

        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        choose_backend(NAME, config.backend, dict.fromkeys(ATTENTION_BACKENDS))
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The model's config with such attention.  It is changed in place, unless it is itself attention's."""
        converted = 0
        for _, varlen, parent, attribute in list(model_config.traverse(VarlenAttention.Config)):
            if type(varlen) is not VarlenAttention.Config:  # a subclass, whose forward may do more
                continue
            given = {f.name: getattr(varlen, f.name) for f in fields(varlen)}
            made = OnchipAttention.Config(**given, backend=self.config.backend)
            converted += 1
            model_config = _put(made, parent, attribute, model_config)
        if not converted:
            raise ValueError(
                f"{NAME}: no VarlenAttention of the model is left to convert; build it with attn_backend='varlen'"
            )
        return model_config
