"""One folder per op: the contract (reference.py), the plan (spec.py), and one file per front end."""
