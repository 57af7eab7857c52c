"""The arguments with which `warm_up` calls the op.  No framework."""

from typing import Any

from onchip.frontend.warm_up import Make, Sizes, WarmUpCall


def _arguments(s: Sizes, make: Make) -> dict[str, Any]:
    sizes = make(s.experts, dtype="int32")
    sizes[0] = s.tokens
    weight = make(s.experts, s.out_features, s.in_features, of_weight=True)
    return {"x": make(s.tokens, s.in_features), "weight": weight, "group_sizes": sizes}


CALLS = {"grouped_matmul": WarmUpCall(("in_features", "out_features", "experts"), _arguments)}
