"""A dictionary with a bound."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


_set = OrderedDict.__setitem__


class Recent(OrderedDict[K, V]):
    """A dictionary of at most `most` items: the one that was set longest ago makes way."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        _set(self, key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if it has none; set again, so that it is the newest."""
        if key not in self:
            self[key] = make()
        self.move_to_end(key)
        return self[key]
