"""Tuning: which block sizes are fastest on this device, measured once and stored."""

TUNINGS = {
    "torch": {op: f"onchip.tune.{op}" for op in ("linear_cross_entropy", "fp8_linear", "grouped_matmul")},
    "jax": {"linear_cross_entropy": "onchip.tune.linear_cross_entropy_jax"},
}
"""The modules of the ops that are tuned, by framework."""
