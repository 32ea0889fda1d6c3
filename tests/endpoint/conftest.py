from __future__ import annotations

from pathlib import Path

import pytest

from peers.engines.demo import make_policy

CHATML = (
    "{% for m in messages %}{{ '<bos>' + m.role + ':' + m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant:' }}{% endif %}"
)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy with random weights and a chat template."""
    folder = tmp_path_factory.mktemp("endpoint") / "tiny"
    make_policy(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder
