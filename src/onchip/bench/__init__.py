"""Benchmarks: timing, peak memory, checks of results, and reports.  Nothing here knows an op by name."""
