"""Every test here needs the emulator's compiler."""

from host_build import needs_compiler as needs_compiler
