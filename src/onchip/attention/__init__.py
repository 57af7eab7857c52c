"""The engine of attention: masks as ranges of keys, and the code that computes attention under them."""
