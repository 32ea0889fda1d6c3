"""A whole swarm on this machine, as separate processes on loopback: what `swarm demo` runs.

`command` puts it together, `processes` keeps the processes alive, `state` folds their events into
what is known, `view` draws that, `summary` says at the end what it came to.
"""

from swarm.demo.command import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
