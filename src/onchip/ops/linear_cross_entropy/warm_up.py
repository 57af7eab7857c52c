"""The arguments with which `warm_up` calls the op.  No framework."""

from onchip.frontend.warm_up import WarmUpCall, head, ids

CALLS = {
    "linear_cross_entropy": WarmUpCall(("hidden", "vocab"), lambda s, make: head(s, make) | {"target": ids(s, make)}),
}
