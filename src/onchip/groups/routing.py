"""How a router spreads tokens over experts, the groups of a product: options, sizes, statistics.  No framework."""

from collections.abc import Collection, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

from onchip.frontend.options import require_bool, require_int, require_one_of, require_positive

Scoring = Literal["softmax", "sigmoid"]
SCORINGS = get_args(Scoring)
LEAST_TOTAL = 1e-20
"""Added to a sum of scores before it divides, as DeepSeek-V3 has it: sigmoids may all be 0."""


A = TypeVar("A")


class MoEStats(NamedTuple, Generic[A]):
    """How tokens were spread over the experts.  Both losses and `mean_prob` have gradients."""

    counts: A
    """[E] int32: the tokens that went to each expert."""
    fraction: A
    """[E] float32: `counts` divided by their sum."""
    mean_prob: A
    """[E] float32: each expert's share of a token's scores, averaged over tokens."""
    aux_loss: A
    """0-d float32: the load-balancing loss E * sum(fraction * mean_prob), which is 1 if both are even.  Its gradient
    goes through mean_prob."""
    z_loss: A
    """0-d float32: the mean over tokens of logsumexp(logits)**2, which keeps the router's logits small."""


def stats_of(counts: A, fraction: A, probs: Any, lse: Any) -> MoEStats[A]:
    """`probs` [T, E]: each token's scores divided by their sum.  `lse` [T]: logsumexp of its logits."""
    tokens, experts = max(probs.shape[0], 1), probs.shape[1]
    mean_prob = probs.sum(0) / tokens
    return MoEStats(counts, fraction, mean_prob, experts * (fraction * mean_prob).sum(), (lse**2).sum() / tokens)


def check_sizes(op: str, sizes: Mapping[str, Any], may_be_0: Collection[str] = ()) -> None:
    """Raise for sizes that are no ints, or too small."""
    for name, size in sizes.items():
        require_int(op, name, size)
        least = 0 if name in may_be_0 else 1
        if size < least:
            raise ValueError(f"{op}: {name} must be {least} or more; got {size}")


def check_routing(op: str, norm_topk: Any, scoring: Any, scaling_factor: Any) -> None:
    """Raise for a router's options that are wrong."""
    require_bool(op, "norm_topk", norm_topk)
    require_one_of(op, "scoring", scoring, SCORINGS)
    require_positive(op, "scaling_factor", scaling_factor)


def check_groups(op: str, num_experts: int, top_k: int, n_group: Any, topk_group: Any) -> None:
    """Raise for groups of experts that don't go with their number and with top_k."""
    check_sizes(op, {"n_group": n_group, "topk_group": topk_group})
    if topk_group > n_group:
        raise ValueError(f"{op}: topk_group must be at most n_group={n_group}; got {topk_group}")
    if n_group == 1:
        return
    if num_experts % n_group or num_experts // n_group < 2:
        raise ValueError(
            f"{op}: n_group={n_group} must divide the {num_experts} experts into groups of two or more, as a group is "
            "chosen by its two largest scores"
        )
    if top_k > topk_group * (num_experts // n_group):
        raise ValueError(
            f"{op}: top_k={top_k} but topk_group={topk_group} groups have {topk_group * (num_experts // n_group)} "
            "experts; raise topk_group"
        )
