"""The options of `linear_cross_entropy` that integrations pass on; the model determines all others."""

from dataclasses import make_dataclass

from onchip.frontend.options import LossTerms, ScratchBytes

TERMS = LossTerms._fields
"""Those that add to a model's own loss."""

HeadOptions = make_dataclass(
    "HeadOptions",
    [
        *((name, float, 0.0) for name in TERMS),
        ("scratch_bytes", ScratchBytes, None),
        ("backend", str, "auto"),
        ("precision", str, "full"),
    ],
    kw_only=True,
)
