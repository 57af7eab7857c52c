"""The Triton backend against the oracle, without a GPU: ce_interpreted.py has the checks, and says how it is run."""

import ce_interpreted

from interpreter import interpreted

outcomes, test_interpreted = interpreted(ce_interpreted)
