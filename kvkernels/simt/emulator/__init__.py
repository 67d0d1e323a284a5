"""Runs the SIMT sources on the CPU, for tests: numbers, races, bounds. Needs a C++ compiler."""
