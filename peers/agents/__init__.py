"""Environments that others serve: `openenv`, an OpenEnv server, and `mcp`, tools of an MCP server.

Both speak the protocols themselves, with a bound on the time and the bytes of every answer, and
import neither library. Servers run on the trusted side of a run: a run's manifest has the name of
one, and a file on the environment peer's machine says what it is (`servers`). Imports no torch.

For other rooms, by the names in docs/rooms.md: `servers`
"""
