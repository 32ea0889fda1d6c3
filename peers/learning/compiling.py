"""torch.compile of a policy's layers, where the trainer's settings ask for it."""

from __future__ import annotations

from typing import Any

import torch

from swarm.errors import UserError


def compile_layer(layer: Any) -> None:
    """Have a layer run compiled, in place; it is compiled at its first pass.

    Sizes are symbols from the beginning: passes differ in rows and tokens, and each new size would
    compile again. Compiled code takes other kernels, so results differ by rounding.
    """
    layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raise `UserError` if torch.compile cannot make code for this device."""
    reason = ""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            reason = "Triton cannot compile for this GPU"
    else:
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            reason = "no C++ compiler was found (g++ or clang++)"
    if reason:
        raise UserError(f"trainer.compile: {reason}; install it, or omit the setting")
