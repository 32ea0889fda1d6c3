from __future__ import annotations

from tests.docs.answers_page import PAGE, page


def test_the_page_has_the_table_of_answers() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.docs.answers_page"
