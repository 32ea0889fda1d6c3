"""Arithmetic with tools, in several turns."""

from peers.environments.tools.environment import Tools, ToolsOptions

__all__ = ["Tools", "ToolsOptions"]
