"""Microbenchmarks: a reference check before every timing, ratios instead of bare seconds."""
