"""The Triton backend against the oracle, without a GPU: interpreted.py has the checks, and is run apart."""

import interpreted as script

from interpreter import interpreted

outcomes, test_interpreted = interpreted(script)
