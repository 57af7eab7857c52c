"""`onchip plan`: what an op will cost, from the shapes alone.  Imports no framework.

`run.py` is the front door.  `linear_cross_entropy` has a table by strategy and budget (`strategies.py`), the other ops
and its precision='fp8' one by pass and budget (`passes.py`).
"""
