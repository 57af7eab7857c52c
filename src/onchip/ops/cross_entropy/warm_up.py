"""What `warm_up` calls the op with.  No framework."""

from onchip.frontend.warm_up import Call, ids

CALLS = {
    "cross_entropy": Call(("vocab",), lambda s, make: {"logits": make(s.tokens, s.vocab), "target": ids(s, make)}),
}
