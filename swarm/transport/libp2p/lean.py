"""Imports libp2p without the parts that no peer of ours uses (QUIC, TLS with certificates, mDNS,
its DHT, GossipSub, RSA, a DNS client): of 1,200 modules and 55 MB 420 and 17 are left, and half a
second less. Their names can be imported meanwhile, and raise `PartLeftOut` when used."""

import sys
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from google.protobuf.internal import api_implementation

from swarm.data import beside

LEFT_OUT = beside(__file__, dict[str, tuple[str, ...]])["left_out"]
"""The parts, from `lean.toml`."""
if api_implementation.Type() != "python":  # protobuf in C, as in its wheels
    LEFT_OUT += ("google.protobuf.internal.python_message",)

IDLE = ("multiaddr.resolvers.DNSResolver",)
"""Classes of these parts of which libp2p makes an object that it then does not use here."""


class PartLeftOut(Exception):
    """A part of libp2p that was left out is used after all."""


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__qualname__}.{name}")

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if cls.__qualname__ in IDLE:
            return object()
        raise PartLeftOut(f"{cls.__qualname__}; see {__name__}")


def _absent(name: str) -> type:
    """A class that stands for whatever is imported. It can be inherited from, and caught."""
    return _Meta(name, (Exception,), {"__qualname__": name})


class _Empty(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 — of every package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(tuple(f"{part}." for part in LEFT_OUT)) or name in LEFT_OUT:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _leaving_out() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty)]:
            del sys.modules[name]
            package, _, part = name.rpartition(".")
            if package in sys.modules:  # `from package import part` would find it there
                vars(sys.modules[package]).pop(part, None)


if "libp2p" not in sys.modules:
    with _leaving_out():
        import libp2p  # noqa: F401
