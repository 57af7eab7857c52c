"""`onchip check --fuzz`: random legal calls of every op, compared with the float64 oracles."""
