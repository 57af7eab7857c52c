"""Benchmarks: timing, peak memory, correctness gate and reports.  Knows no op by name."""
