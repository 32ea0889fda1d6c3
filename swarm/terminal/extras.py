"""The distribution's extras: packages that only some commands and roles need."""

import importlib.util

from swarm.errors import UserError

_COMPUTING = (
    *("torch", "transformers", "tokenizers", "jinja2", "safetensors", "huggingface_hub"),
    *("httpx2", "pyarrow", "fsspec"),
)
EXTRAS = {
    "infer": _COMPUTING,
    "train": _COMPUTING,
    "plots": ("matplotlib",),
    "endpoint": ("hypercorn", "starlette"),
    "dashboard": ("hypercorn", "starlette"),
    "gguf": ("gguf", "accelerate"),
    "languages": ("lingua",),
    "agents": ("mcp",),
    "merge": ("mergekit",),
    "structured": ("outlines_core",),
}
"""Modules that come with each extra."""

EXTRA_OF_ROLE = {"inference": "infer", "validator": "infer", "trainer": "train", "replica": "train"}


def require_extra(extra: str, what: str) -> None:
    """Raise `UserError` unless an extra is installed; `what`: the command or role that needs it."""
    missing = [module for module in EXTRAS[extra] if not _is_installed(module)]
    if missing:
        raise UserError(
            f"{what} needs {', '.join(missing)}, which this environment lacks; "
            f"type: pip install 'swarm-rl[{extra}]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
