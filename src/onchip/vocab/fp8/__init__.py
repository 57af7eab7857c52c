"""The softmax of logits that are products of FP8 numbers."""
