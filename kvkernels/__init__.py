"""kvkernels: attention straight from compressed KV-cache records."""

__version__ = "0.1.0"
