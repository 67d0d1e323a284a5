"""Microbenchmarks with a reference check before every timing, and ratios instead of bare seconds."""
