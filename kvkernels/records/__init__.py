"""The compressed record format: the only place that knows a byte offset (codec.md 1, 5, 5b)."""
