"""The arguments with which `warm_up` calls the op.  No framework."""

from typing import Any

from onchip.frontend.warm_up import Make, Sizes, WarmUpCall


def _arguments(s: Sizes, make: Make) -> dict[str, Any]:
    return {"x": make(s.tokens, s.in_features), "weight": make(s.out_features, s.in_features, of_weight=True)}


CALLS = {"fp8_linear": WarmUpCall(("in_features", "out_features"), _arguments)}
