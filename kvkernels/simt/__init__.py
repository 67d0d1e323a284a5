"""What CUDA, HIP and OpenCL share: kernel sources in one macro dialect, their assembly, the device
that launches them through a driver, and an emulator that runs them on the CPU for tests.
"""
