from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.docs.models_table import TABLES, shown


@pytest.mark.parametrize(("pattern", "make"), TABLES.items(), ids=["described", "general"])
def test_the_page_lists_the_families_of_the_program(
    pattern: re.Pattern[str], make: Callable[[], str]
) -> None:
    assert shown(pattern) == make(), "run python -m tests.docs.models_table"
