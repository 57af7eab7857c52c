"""The arguments with which `warm_up` calls the op.  No framework."""

from onchip.frontend.warm_up import WarmUpCall, head, ids

CALLS = {
    "linear_log_probs": WarmUpCall(("hidden", "vocab"), lambda s, make: head(s, make) | {"ids": ids(s, make)}),
    "log_probs": WarmUpCall(("vocab",), lambda s, make: {"logits": make(s.tokens, s.vocab), "ids": ids(s, make)}),
}
