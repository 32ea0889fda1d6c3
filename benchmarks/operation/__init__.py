"""Figures of a swarm in operation: joining, scale, signals, upgrades, a month.

    python -m benchmarks.operation joining signals --out operation.json

Each figure is a module here with a `measure()` that returns one `msgspec.Struct`. Its docstring
says what is measured; its command line options are module constants, so that a figure always means
the same. Prints one JSON object.
"""
