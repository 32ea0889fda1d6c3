"""Checks of a run's formulas: are they here, as the owner signed them, and do they work?"""

import torch
from msgspec.structs import replace

from peers.learning import advantages, formulas
from peers.learning.advantages import Completions
from peers.learning.formulas import Tokens
from peers.learning.installed import FormulaError, find, packages_digest
from peers.learning.objective import Totals, loss
from swarm.errors import UserError
from swarm.wire.manifest import Objective


def check_formulas(objective: Objective) -> None:
    """Raise `UserError` for a formula not installed, other than signed, or with other options."""
    if not objective.learns:
        return
    # First: of a package that is not the owner's, nothing is run.
    if objective.digest and packages_digest(objective) != objective.digest:
        raise UserError(
            f"objective.name {objective.name!r} and objective.advantage {objective.advantage!r} "
            "come from other packages here than those that the run's owner signed; install the "
            "owner's versions on this trainer"
        )
    find("objective", formulas.FORMULAS, objective)
    find("advantage", advantages.FORMULAS, objective)


def with_digest(objective: Objective) -> Objective:
    """An objective with its packages' hash; raises `UserError` if a formula fails a trial, too."""
    check_formulas(replace(objective, digest=b""))
    objective = replace(objective, digest=packages_digest(objective))
    if objective.learns:
        try:
            _try(objective)
        except FormulaError as error:
            raise UserError(f"{error}; repair it before the run is signed") from error
    return objective


def _try(objective: Objective) -> None:
    """Compute the gradient of 8 completions of 3 tokens; raises `FormulaError`."""
    some = Completions.of([[0.0, 1.0, 0.5, 0.0], [1.0, 0.0, 0.0, 0.25]], torch.full((8,), 3))
    draws = torch.Generator().manual_seed(0)
    old, pi, reference = -3 * torch.rand(3, 24, generator=draws) - 0.01
    pi = (old + 0.1 * (pi - old)).requires_grad_()
    tokens = Tokens(
        log_pi=pi,
        log_old=old,
        log_mu=old,
        advantage=advantages.advantages(objective, some, 3).repeat_interleave(3),
        entropy=-pi.detach(),
        completion=torch.arange(8).repeat_interleave(3),
        log_reference=reference,
        completions=8,
    )
    value, _ = loss(objective, tokens, Totals(24, 8, 3))
    try:
        (gradient,) = torch.autograd.grad(value, pi)
    except Exception as error:  # such as of a tensor that was changed in place
        raise FormulaError(f"the objective {objective.name!r} has no gradient: {error}") from error
    if not gradient.isfinite().all():
        raise FormulaError(f"the gradient of the objective {objective.name!r} is not finite")
