"""Options that only a page explains: each has its row there (decision 71)."""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest

from peers.agents.mcp import McpOptions
from peers.agents.openenv import OpenEnvOptions
from peers.agents.servers import Definition
from peers.endpoint.harness.environment import HarnessOptions
from peers.environments.chat import ChatOptions
from peers.environments.dataset import DataOptions
from peers.environments.terminal.environment import TerminalOptions
from peers.environments.verifiers.environment import VerifiersOptions
from tests.docs.pages import text

EXPLAINED: dict[type[msgspec.Struct], str] = {
    McpOptions: "agents",
    OpenEnvOptions: "agents",
    Definition: "agents",
    HarnessOptions: "endpoint",
    ChatOptions: "environments",
    DataOptions: "data",
    TerminalOptions: "environments",
    VerifiersOptions: "verifiers",
}


@pytest.mark.parametrize("options", EXPLAINED, ids=lambda options: options.__name__)
def test_the_page_explains_every_option(options: type[msgspec.Struct]) -> None:
    page = text(f"docs/{EXPLAINED[options]}.md")
    for name in inspect.get_annotations(options):  # its own, without those of a base
        row = re.search(rf"^\|[^|]*`{name}`[^|]*\|.*[^| ] \|$", page, re.M)
        assert row is not None, f"docs/{EXPLAINED[options]}.md has no row for {name}"
