"""OpenCL devices through pyopencl; nothing of it is imported before a probe."""
