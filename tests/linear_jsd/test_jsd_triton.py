"""The Triton backend against the oracle, without a GPU: jsd_interpreted.py has the checks and says why it is apart."""

import jsd_interpreted

from interpreter import interpreted

outcomes, test_interpreted = interpreted(jsd_interpreted)
