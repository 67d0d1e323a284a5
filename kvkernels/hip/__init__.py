"""AMD cards through the HIP runtime of an installed ROCm, called by ctypes; no package needed."""
