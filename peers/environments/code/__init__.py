"""Programming tasks: Python that a model writes, judged by hidden tests in a sandbox."""

from peers.environments.code.environment import Code, CodeOptions

__all__ = ["Code", "CodeOptions"]
