"""Pushing: every so many policies are uploaded to the Hugging Face hub, beside the training."""

import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from swarm.errors import UserError
from swarm.events import Events
from swarm.run.run import Run

PUSH_SECONDS = 3600.0
"""Time for one upload: 62 GB at 140 Mb/s."""


@dataclass(eq=False)
class Pusher:
    """Uploads policies to one repository, one at a time; a failure is an event."""

    repository: str
    aside: Path
    """Folder for links to the files: the store deletes old policies while they are uploaded."""
    events: Events
    tried: int = 0
    """Step of the newest policy whose upload was begun."""
    _turn: trio.Lock = field(default_factory=trio.Lock)

    async def push(self, step: int, folder: Path, run: Run) -> None:
        """Upload the policy after a step of a run, unless that or a newer one was tried before."""
        from peers.models.push import Origin, card, push  # most trainers need no hub

        async with self._turn:
            if step <= self.tried:
                return
            self.tried = step
            try:
                await trio.to_thread.run_sync(_link, folder, self.aside)
                upload = partial(
                    push,
                    self.aside,
                    self.repository,
                    card(Origin(run.id, run.manifest, step), Path(self.repository)),
                    private=False,
                    message=f"The policy after {step} steps",
                )
                with trio.fail_after(PUSH_SECONDS):
                    address = await trio.to_thread.run_sync(upload, abandon_on_cancel=True)
            except (UserError, OSError, trio.TooSlowError) as error:
                why = str(error) or f"it took more than {PUSH_SECONDS:.0f} s"
                self.events.emit(
                    "trainer.push_failed", step=step, repository=self.repository, reason=why
                )
            else:
                self.events.emit("trainer.pushed", step=step, address=address)
            finally:
                shutil.rmtree(self.aside, ignore_errors=True)


def _link(source: Path, folder: Path) -> None:
    from peers.models.push import PUSHED

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted({path for pattern in PUSHED for path in source.glob(pattern)}):
        (folder / path.name).hardlink_to(path)
