"""One folder per op: the contract (reference.py), the options (spec.py), and one file per front end."""

LOSSES = ("linear_cross_entropy", "linear_log_probs", "cross_entropy", "linear_jsd")
OPS = (*LOSSES, "fp8_linear", "grouped_matmul", "collective_matmul")
