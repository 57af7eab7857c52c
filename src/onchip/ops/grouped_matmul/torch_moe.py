"""A mixture-of-experts layer for PyTorch on top of grouped_matmul: the module, and the functions that it is made of."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from onchip.core.backends import choose_backend
from onchip.frontend.options import require_bool, require_positive
from onchip.frontend.torch_inputs import DTYPES, LOSS_DTYPES, accumulator, dtype_name, require_tensor
from onchip.frontend.torch_module import typed_as
from onchip.frontend.torch_types import Backend
from onchip.groups.problem import WeightLayout
from onchip.groups.routing import LEAST_TOTAL, MoEStats, Scoring, check_groups, check_routing, check_sizes, stats_of
from onchip.ops.grouped_matmul.torch_op import BACKENDS, grouped_matmul


class Routing(NamedTuple):
    """Where tokens go."""

    experts: Tensor
    """[T, top_k] int64, the largest score first, with the correction bias if there is one."""
    weights: Tensor
    """[T, top_k]: the factors of these experts' results."""
    probs: Tensor
    """[T, E]: a token's scores, divided by their sum."""


class Groups(NamedTuple):
    """The choices of all tokens, sorted by expert: the rows of the products."""

    order: Tensor
    """[T * top_k] int64: the place of each row's choice in `experts.flatten()`."""
    rows: Tensor
    """[T * top_k] int64: the row's token."""
    ends: Tensor
    """[E] int32: where each expert's rows end.  Rows past the last end belong to no expert."""


def route(
    logits: Tensor,
    top_k: int,
    *,
    norm_topk: bool,
    scoring: Scoring,
    scaling_factor: float,
    correction_bias: Tensor | None = None,  # [E]: of the choice alone
    n_group: int = 1,
    topk_group: int = 1,
) -> Routing:
    """Each token's top_k experts, given router logits [T, E]."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    probs = scores / (scores.sum(-1, keepdim=True) + LEAST_TOTAL)
    # No gradient goes through the choice.
    choice = scores.detach()
    if correction_bias is not None:
        choice = choice + correction_bias.detach().to(choice.dtype)
    experts = best_groups(choice, n_group, topk_group).topk(top_k).indices
    weights = scores.gather(1, experts)
    if norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_TOTAL)
    return Routing(experts, weights * scaling_factor, probs)


def best_groups(choice: Tensor, n_group: int, topk_group: int) -> Tensor:
    """The scores [T, E], those of a token's topk_group best of n_group groups of neighbouring experts; -inf elsewhere.

    A group's score is the sum of its two largest.
    """
    if topk_group == n_group:
        return choice
    grouped = choice.view(-1, n_group, choice.shape[1] // n_group)
    best = grouped.topk(2).values.sum(2).topk(topk_group).indices
    mine = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~mine[..., None], -torch.inf).flatten(1)


def group(experts: Tensor, num_experts: int) -> Groups:
    """Sort the choices [T, top_k] by expert, those of a token in their order; an id out of [0, E) is no expert's."""
    chosen = experts.flatten()
    ids, order = chosen.where(chosen >= 0, num_experts).sort(stable=True)
    # Not bincount, which reads the largest id on the host.
    each = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    return Groups(order, order // experts.shape[1], torch.searchsorted(ids, each, right=True, out_int32=True))


def moe_forward(
    x: Tensor,  # [T, H]
    groups: Groups,
    weights: Tensor,  # [T, top_k]
    widening: Tensor,  # [E, 2 F, H], or [E, N, H] with an activation to [T, F]
    down: Tensor,  # [E, H, F]
    *,
    widening_bias: Tensor | None = None,  # [E, 2 F] or [E, N]
    down_bias: Tensor | None = None,  # [E, H]
    weight_layout: WeightLayout = "gnk",
    activation: Callable[[Tensor], Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """[T, H]: each token's experts applied to it, and their results added up, multiplied by its weights.

    Without an `activation`, the first product computes SwiGLU, gate before up.
    """
    first = grouped_matmul(
        x,
        widening,
        group_offsets=groups.ends,
        weight_layout=weight_layout,
        bias=widening_bias,
        activation="swiglu" if activation is None else None,
        rows=groups.rows,
        backend=backend,
    )
    return grouped_matmul(
        first if activation is None else activation(first),
        down,
        group_offsets=groups.ends,
        weight_layout=weight_layout,
        bias=down_bias,
        row_scale=weights.flatten().gather(0, groups.order).to(accumulator(x.dtype)),
        scatter_rows=groups.rows,
        num_rows=x.shape[0],
        backend=backend,
    )


class Router(nn.Linear):
    """The layer that computes router logits: in float32, also under autocast and whatever its weight was cast to."""

    def forward(self, input: Tensor) -> Tensor:
        dtype, kind = accumulator(input.dtype), input.device.type
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):
            return F.linear(input.to(dtype), self.weight.to(dtype), bias)


class MoE(nn.Module):
    r"""A mixture of experts with SwiGLU, in place of a transformer's MLP.

    Each token goes to all of the `top_k` experts with the largest scores: there is no capacity, and no token is
    dropped.  With scores s = softmax(router x), or sigmoid(router x), and the set C of a token's chosen experts::

        expert_e(x) = down[e] @ (silu(gate) * up)            # gate, up: halves of gate_up[e] @ x
        y = sum over e in C of w_e * expert_e(x) + shared(x)
        w_e = scaling_factor * s_e / (sum of s over C)       # norm_topk=False: scaling_factor * s_e

    With a correction bias b, C has the experts with the largest s + b; the weights come from s only.

    Args:
        hidden: H, the size of a token.
        intermediate: F, the inner size of an expert.
        num_experts: E.
        top_k: experts per token.
        num_shared: if above 0, every token also goes to a shared expert of inner size num_shared * F.
        norm_topk: divide the weights by their sum, as Mixtral, Qwen3 and DeepSeek-V3 do.
        scoring: "softmax" over all experts, or "sigmoid" of each logit (DeepSeek-V3).
        scaling_factor: multiplies the weights (DeepSeek-V3: 2.5).
        correction_bias: give the layer a buffer `e_score_correction_bias`, [E] float32, zeros at first, which is added
            to the scores when experts are chosen.  `update_correction_bias` changes it so as to balance the experts,
            without a loss.
        n_group, topk_group: the experts form n_group groups of neighbours, and a token's experts come from its
            topk_group best groups, by the sum of a group's two largest scores (DeepSeek-V3: 8 and 4).
        bias: whether the router and all experts add biases.
        device, dtype: as in `torch.nn.Linear`; the router computes in float32.
        backend: as in `grouped_matmul`.

    The parameters are gate_up [E, 2 F, H], whose first F rows are the gate's, and down [E, H, F]; with bias also
    gate_up_bias [E, 2 F] and down_bias [E, H].  router and, with num_shared, shared_gate_up and shared_down are linear
    layers.  All are initialised as nn.Linear's are.

    `forward(x)` takes x [..., H], and returns y of the same shape and of x's dtype (under autocast, of its dtype).
    With `return_stats=True` it returns (y, `MoEStats`).  Add a small part of their aux_loss to the loss (0.01 in
    Switch), or of their z_loss (0.001 in ST-MoE).  It never waits for the device.

    Raises:
        TypeError: an argument has the wrong type; in forward, x has another dtype than the experts.
        ValueError: a size is below 1, top_k is above num_experts, or an option has no such value; in forward, a shape
            is wrong.

    Memory: that of two calls of `grouped_matmul` with T * top_k rows, one with `rows` and one with `scatter_rows`.

    Example:
        >>> import torch
        >>> from onchip.torch import MoE
        >>> layer = MoE(16, 32, num_experts=4, top_k=2)
        >>> y, stats = layer(torch.randn(2, 5, 16), return_stats=True)
        >>> y.shape, int(stats.counts.sum())
        (torch.Size([2, 5, 16]), 20)
        >>> (y.square().mean() + 0.01 * stats.aux_loss).backward()

    Sources: the layer and its balancing loss as in Switch Transformers (arXiv:2101.03961), top-k as in Mixtral
    (arXiv:2401.04088), shared experts, sigmoids and groups as in DeepSeek-V3 (arXiv:2412.19437), the correction bias
    and its update as in Loss-Free Balancing (arXiv:2408.15664), the z-loss as in ST-MoE (arXiv:2202.08906).
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        num_shared: int = 0,
        norm_topk: bool = True,
        scoring: Scoring = "softmax",
        scaling_factor: float = 1.0,
        correction_bias: bool = False,
        n_group: int = 1,
        topk_group: int = 1,
        bias: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        sizes = {"hidden": hidden, "intermediate": intermediate, "num_experts": num_experts, "top_k": top_k}
        check_sizes("MoE", sizes | {"num_shared": num_shared}, may_be_0=("num_shared",))
        if top_k > num_experts:
            raise ValueError(f"MoE: top_k must be at most num_experts={num_experts}; got {top_k}")
        check_routing("MoE", norm_topk, scoring, scaling_factor)
        require_bool("MoE", "correction_bias", correction_bias)
        check_groups("MoE", num_experts, top_k, n_group, topk_group)
        require_bool("MoE", "bias", bias)
        choose_backend("MoE", backend, dict.fromkeys(BACKENDS))
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in LOSS_DTYPES:
            *most, last = DTYPES.values()
            raise TypeError(f"MoE: dtype must be {', '.join(most)}, {last} or float64; got {dtype}")
        super().__init__()
        self.hidden, self.intermediate, self.num_experts, self.top_k = hidden, intermediate, num_experts, top_k
        self.num_shared, self.norm_topk, self.scoring = num_shared, norm_topk, scoring
        self.scaling_factor, self.backend = scaling_factor, backend
        self.n_group, self.topk_group = n_group, topk_group

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = Router(hidden, num_experts, bias, device, accumulator(dtype))
        self.gate_up = parameter(num_experts, 2 * intermediate, hidden)
        self.down = parameter(num_experts, hidden, intermediate)
        self.gate_up_bias = parameter(num_experts, 2 * intermediate) if bias else None
        self.down_bias = parameter(num_experts, hidden) if bias else None
        self.reset_parameters()
        zeros = torch.zeros(num_experts, device=device, dtype=accumulator(dtype)) if correction_bias else None
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", zeros)
        self.shared_gate_up = self.shared_down = None
        if num_shared > 0:
            inner = num_shared * intermediate
            self.shared_gate_up = nn.Linear(hidden, 2 * inner, bias, device, dtype)
            self.shared_down = nn.Linear(inner, hidden, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the experts' parameters anew, uniform in +-1 / sqrt(inputs), as nn.Linear does."""
        for weight, bias in ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias)):
            for x in (weight, bias):
                if x is not None:
                    nn.init.uniform_(x, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    @overload
    def forward(self, x: Tensor, *, return_stats: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, return_stats: Literal[True]) -> tuple[Tensor, MoEStats[Tensor]]: ...
    def forward(self, x: Tensor, *, return_stats: bool = False) -> Tensor | tuple[Tensor, MoEStats[Tensor]]:
        """See the class."""
        require_tensor("MoE", "x", x)
        require_bool("MoE", "return_stats", return_stats)
        if x.ndim < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"MoE: x must be [..., H] with H={self.hidden}; got shape {list(x.shape)}")
        if x.dtype not in LOSS_DTYPES:
            raise TypeError(f"MoE: x must have a floating-point dtype, like the experts; got {dtype_name(x.dtype)}")
        tokens = x.reshape(-1, self.hidden)
        logits = self.router(tokens)
        routing = route(
            logits,
            self.top_k,
            norm_topk=self.norm_topk,
            scoring=self.scoring,
            scaling_factor=self.scaling_factor,
            correction_bias=self.e_score_correction_bias,
            n_group=self.n_group,
            topk_group=self.topk_group,
        )
        groups = group(routing.experts, self.num_experts)
        y = moe_forward(
            tokens,
            groups,
            routing.weights,
            self.gate_up,
            self.down,
            widening_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            backend=self.backend,
        )
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(tokens).chunk(2, -1)
            y = y + self.shared_down(F.silu(gate) * up)
        y = y.reshape(x.shape)
        return (y, moe_stats(logits, routing, groups)) if return_stats else y

    @torch.no_grad()
    def update_correction_bias(self, counts: Tensor, rate: float = 0.001) -> None:
        """e_score_correction_bias += rate * sign(mean(counts) - counts): experts with too many tokens get fewer.

        Call it once a step, after backward: a forward that is recomputed must choose the same experts.

        Args:
            counts: [E] of any real dtype: the tokens that went to each expert in the step, from `MoEStats`, summed over
                micro-batches and the ranks that share the layer.
            rate: how far a step goes, above 0 (DeepSeek-V3: 0.001).

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: the layer has no correction_bias, or its buffer was cast to 16 bits, which would lose such small
                steps; counts has a wrong shape or is on another device; or rate isn't above 0.

        Memory: a few tensors of E numbers.

        Example:
            >>> import torch
            >>> from onchip.torch import MoE
            >>> layer = MoE(16, 32, num_experts=4, top_k=2, scoring="sigmoid", correction_bias=True)
            >>> y, stats = layer(torch.randn(2, 5, 16), return_stats=True)
            >>> layer.update_correction_bias(stats.counts)

        Source: Loss-Free Balancing (arXiv:2408.15664).
        """
        op, bias = "MoE.update_correction_bias", self.e_score_correction_bias
        require_tensor(op, "counts", counts)
        require_positive(op, "rate", rate)
        if bias is None:
            raise ValueError(f"{op}: the layer has no correction bias; create it with MoE(..., correction_bias=True)")
        if bias.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{op}: e_score_correction_bias was cast to {dtype_name(bias.dtype)}, which loses small steps; set "
                "layer.e_score_correction_bias = layer.e_score_correction_bias.float()"
            )
        if counts.shape != bias.shape or counts.device != bias.device:
            raise ValueError(
                f"{op}: counts must be [E], {list(bias.shape)}, on {bias.device}; got shape {list(counts.shape)} on "
                f"{counts.device}"
            )
        if counts.dtype.is_complex or counts.dtype == torch.bool:
            raise TypeError(f"{op}: counts must be real numbers; got {dtype_name(counts.dtype)}")
        load = counts.to(bias.dtype)
        bias.add_(torch.sign(load.mean() - load), alpha=rate)

    if TYPE_CHECKING:  # torch.nn.Module.__call__ has no types

        @typed_as(forward)
        def __call__(self, *given: Any, **options: Any) -> Any: ...

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from their defaults."""
        sizes = f"{self.hidden}, {self.intermediate}, num_experts={self.num_experts}, top_k={self.top_k}"
        given: dict[str, tuple[object, object]] = {
            "num_shared": (self.num_shared, 0),
            "norm_topk": (self.norm_topk, True),
            "scoring": (self.scoring, "softmax"),
            "scaling_factor": (self.scaling_factor, 1.0),
            "correction_bias": (self.e_score_correction_bias is not None, False),
            "n_group": (self.n_group, 1),
            "topk_group": (self.topk_group, 1),
            "bias": (self.gate_up_bias is not None, False),
            "backend": (self.backend, "auto"),
        }
        return ", ".join([sizes, *(f"{name}={x!r}" for name, (x, default) in given.items() if x != default)])


def moe_stats(logits: Tensor, routing: Routing, groups: Groups) -> MoEStats[Tensor]:
    """How router logits [T, E] spread the tokens; without tokens all zeros."""
    counts = groups.ends.diff(prepend=groups.ends.new_zeros(1))
    tokens = max(logits.shape[0], 1)
    fraction = counts.to(logits.dtype) / (tokens * routing.experts.shape[1])
    return stats_of(counts, fraction, routing.probs, logits.logsumexp(-1))
