"""One folder per op: the maths and options (__init__.py), the oracle, and one file per front end."""
