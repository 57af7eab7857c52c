"""The engine of every loss over a vocabulary: projection -> per-token statistics -> gradients."""
