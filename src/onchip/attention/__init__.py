"""The engine of attention: masks as ranges of keys, and what computes attention under them."""
