"""What the correctness cases of all ops are made of: float64 references, inputs, comparisons and their bounds."""
