"""What cuda, hip and opencl share: one table of entries, one kernel family."""
