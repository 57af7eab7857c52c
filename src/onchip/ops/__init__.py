"""One folder per op: the contract (reference.py), the options (spec.py), and one file per front end."""
