"""The engine of every loss over a vocabulary: a projection, statistics per token, and gradients."""
