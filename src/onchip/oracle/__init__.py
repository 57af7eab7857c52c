"""Parts of the correctness cases of all ops: float64 references, inputs, comparisons and their bounds."""
