"""The engine in PyTorch's own products: tiles.py, softmax.py (statistics and gradients), walk.py, loss.py."""
