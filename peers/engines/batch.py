"""A whole batch of requests at once, for callers with nothing to do until it is finished."""

from collections.abc import Sequence

from peers.engines.engine import Engine, Piece, Request
from swarm.world.progress import checkpoint


def generate(engine: Engine, requests: Sequence[Request]) -> list[Piece]:
    """Each request's piece, in order, of an idle engine; raises `ValueError` and leaves it idle."""
    found: dict[int, Piece] = {}
    try:
        for request in requests:
            engine.submit(request)
        while len(found) < len(requests):
            checkpoint()
            for piece in engine.step():
                found[piece.id] = piece
    except BaseException:
        for request in requests:
            engine.cancel(request.id)
        raise
    return [found[request.id] for request in requests]


def requests_for(
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    noise_key: tuple[int, int] | None,
    temperature: float,
    stop_ids: Sequence[int],
    limit: int,
    starts: Sequence[int] | None = None,
) -> list[Request]:
    """Requests with the ids 0, 1, … for prompts that share their sampling settings."""
    return [
        Request(index, prompt, row, noise_key, temperature, tuple(stop_ids), limit, start)
        for index, (prompt, row, start) in enumerate(
            zip(prompts, rows, starts or [0] * len(prompts), strict=True)
        )
    ]
