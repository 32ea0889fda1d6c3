"""A model split by layers: over this machine's devices, or over processes on several machines."""
