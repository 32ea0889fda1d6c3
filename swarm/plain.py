"""The library's functions as plain ones, for scripts and notebooks: no trio is seen.

They run on one trio loop in a thread of its own, which starts with the first call. So a node stays
alive between two calls, or two cells of a notebook, whose own loop is left alone."""

import atexit
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cache, partial, wraps
from threading import Thread
from typing import Generic, ParamSpec, TypeVar

import trio

from swarm import library
from swarm.errors import SwarmError, UserError, leaf_errors

P = ParamSpec("P")
T = TypeVar("T")


@cache
def _loop() -> trio.lowlevel.TrioToken:
    """Start the loop; returns what other threads call it by."""
    started: Future[trio.lowlevel.TrioToken] = Future()

    async def main() -> None:
        started.set_result(trio.lowlevel.current_trio_token())
        await trio.sleep_forever()

    Thread(target=trio.run, args=(main,), name="swarm", daemon=True).start()
    return started.result()


os.register_at_fork(after_in_child=_loop.cache_clear)  # a child has none of its parent's threads


class _Task(Generic[T]):
    """An asynchronous function that runs on the loop."""

    def __init__(self, function: Callable[[Future[T]], Awaitable[None]]) -> None:
        """`function` sets the future; `result` raises an earlier error, `cancel` a later one."""
        if trio.lowlevel.in_trio_run():
            raise UserError(
                "this is a plain function, which would block trio; await the one of the same name "
                "in swarm.library"
            )
        self._function = function
        self._result: Future[T] = Future()
        self._ended: Future[None] = Future()
        self._scope = trio.CancelScope()
        _loop().run_sync_soon(partial(trio.lowlevel.spawn_system_task, self._run))

    async def _run(self) -> None:
        try:
            with self._scope:
                await self._function(self._result)
        except Exception as error:
            # Nurseries are no business of who sees no trio: an error of ours comes without groups.
            ours = [each for each in leaf_errors(error) if isinstance(each, SwarmError)]
            failed = self._ended if self._result.done() else self._result
            failed.set_exception(ours[0] if ours else error)
        if not self._ended.done():
            self._ended.set_result(None)

    def result(self) -> T:
        try:
            return self._result.result()
        except KeyboardInterrupt:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel it and wait for its end."""
        _loop().run_sync_soon(self._scope.cancel)
        self._ended.result()


def _plain(function: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        async def run(result: Future[T]) -> None:
            result.set_result(await function(*args, **kwargs))

        return _Task(run).result()

    return call


class _Open(AbstractContextManager[T]):
    """The plain counterpart of an asynchronous context manager."""

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager

    def __enter__(self) -> T:
        async def hold(result: Future[T]) -> None:
            async with self._manager as value:
                result.set_result(value)
                await trio.sleep_forever()

        self._task = _Task(hold)
        found = self._task.result()
        atexit.register(self._task.cancel)  # a notebook may end without leaving it
        return found

    def __exit__(self, *raised: object) -> None:
        atexit.unregister(self._task.cancel)
        try:
            self._task.cancel()
        except Exception:  # it had failed meanwhile, which explains what the block has raised, too
            if raised[0] is None:
                raise


def _plain_context(
    function: Callable[P, AbstractAsyncContextManager[T]],
) -> Callable[P, AbstractContextManager[T]]:
    @wraps(function)
    def opened(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Open(function(*args, **kwargs))

    return opened


open_node = _plain_context(library.open_node)
visit = _plain_context(library.visit)
publish = _plain_context(library.publish)
status_of = _plain(library.status_of)
ledger_of = _plain(library.ledger_of)
put = _plain(library.put)
get = _plain(library.get)
fetch = _plain(library.fetch)
