"""The arguments with which `warm_up` calls the op.  No framework."""

from onchip.frontend.warm_up import WarmUpCall, ids

CALLS = {
    "cross_entropy": WarmUpCall(
        ("vocab",), lambda s, make: {"logits": make(s.tokens, s.vocab), "target": ids(s, make)}
    ),
}
