"""The roles for which a run's manifest names this peer, checked as new versions come."""

from swarm.errors import UserError
from swarm.run.run import Run
from swarm.wire.identity import PeerId


class NamedRoles:
    """The trusted roles that this peer has taken, each of which the manifest must go on naming."""

    def __init__(self, run: Run, peer_id: PeerId) -> None:
        self._run = run
        self._peer_id = peer_id
        self._taken: set[str] = set()
        self._led = run.manifest.is_trainer(peer_id)
        """Whether this process was named as a trainer."""

    def take(self, role: str) -> None:
        """Take a role, one of `swarm.run.admission.TRUSTED_ROLES`.

        Raises `UserError` if the newest manifest does not name this peer for it."""
        is_named, field = self._is_named(role)
        if not is_named:
            raise UserError(
                f"the manifest of run {self._run.id} does not name peer {self._peer_id} as a "
                f"{role}; its owner must add that id to the manifest's {field}, or use the --home "
                "that has the key"
            )
        self._taken.add(role)

    def check(self) -> None:
        """Raise `UserError` if the newest manifest has taken this peer's role, or its trust."""
        version, run = self._run.manifest.version, self._run.id
        leads = self._run.manifest.is_trainer(self._peer_id)
        if self._led and not leads and self._run.manifest.is_standby(self._peer_id):
            raise UserError(
                f"a standby has taken this trainer's place (version {version} of run {run}); start "
                "it again, and it stands by"
            )
        self._led = leads
        for role in sorted(self._taken):
            is_named, field = self._is_named(role)
            if not is_named:
                raise UserError(
                    f"version {version} of run {run} no longer names this peer, {self._peer_id}, "
                    f"for the role {role}; start it without that role, or ask the run's owner to "
                    f"list it in the manifest's {field} again"
                )
        if not self._run.trusts(self._peer_id):
            raise UserError(
                f"version {version} of run {run} no longer trusts this peer, {self._peer_id}; "
                "start it again"
            )

    def _is_named(self, role: str) -> tuple[bool, str]:
        """Whether the newest manifest names this peer for a trusted role; the field that does."""
        manifest = self._run.manifest
        is_named, field = {
            "trainer": (manifest.may_train, "trainers"),
            "replica": (manifest.is_trainer, "trainers"),
            "validator": (manifest.is_validator, "validators"),
            "environment": (manifest.is_environment_peer, "environment_peers"),
        }[role]
        return is_named(self._peer_id), field
