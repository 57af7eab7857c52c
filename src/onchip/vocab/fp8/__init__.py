"""The softmax of logits whose products are of FP8 numbers."""
