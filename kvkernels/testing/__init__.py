"""The test kit: cases, inputs, comparison, poison, parity; public,
so that a backend author can use it.
"""
