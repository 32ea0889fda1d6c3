from __future__ import annotations

from tests.docs.models_table import shown, table


def test_the_page_lists_the_families_of_the_program() -> None:
    assert shown() == table(), "run python -m tests.docs.models_table"
