"""NVIDIA cards through CuPy; nothing of it is imported before a probe."""
