"""What `warm_up` calls the op with.  No framework."""

from onchip.frontend.warm_up import Call, head, ids

CALLS = {
    "linear_cross_entropy": Call(("hidden", "vocab"), lambda s, make: head(s, make) | {"target": ids(s, make)}),
}
