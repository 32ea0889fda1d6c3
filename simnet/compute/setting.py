"""A peer's machine, and the work that its cost models answer."""

from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from simnet.disk import SimulatedDisk
from swarm.jobs import SubmissionOrder
from swarm.rollouts.seeds import digest

TOKENIZER = b'{"simulated": "tokenizer"}'
WEIGHTS = "model.safetensors"
TOKENIZER_HASH = blake3(TOKENIZER).digest()

PROBE_HASH = digest("simnet/1/probe")
"""The probe hash of every honest simulated machine."""


@dataclass(frozen=True)
class Hardware:
    """Speeds and memory of a peer's machine."""

    tokens_per_second: float = 2000.0
    """Speed of generation, all sequences of a batch together."""
    proof_tokens_per_second: float = 200_000.0
    """Speed of building proofs."""
    prefill_tokens_per_second: float = 40_000.0
    load_bytes_per_second: float = 2e9
    delta_bytes_per_second: float = 1e9
    """Checkpoint bytes per second, when making or applying a delta."""
    environment_seconds: float = 0.05
    grade_seconds: float = 0.05
    step_seconds: float = 60.0
    memory_bytes: int = 1 << 50
    """Memory free for children; by default more than enough."""
    grades: bool = True
    """False: the environment's reward function raises on this machine."""
    hangs: bool = False
    """True: it does not return, so that its process ends."""


@dataclass(frozen=True)
class Workload:
    """Lengths, rewards and sizes of a run's computations."""

    model_bytes: int = 2_000_000
    delta_share: float = 0.0
    """Size of the delta from one policy to the next, as a share of the checkpoint; 0: all weights
    change, and a delta saves nothing."""
    completion_tokens_mean: float = 256.0
    """Mean of the exponentially distributed lengths, which the manifest's limit cuts off."""
    target_lengths: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Target lengths from step s on: ((s, (tokens, ...)), ...), by ascending s. Lengths are then
    near one of these targets, as where prompts ask for a length."""
    turns: int = 1
    """Turns of a served environment after its prompt."""
    prompt_tokens: int = 256
    observation_tokens: int = 64
    is_random: bool = False
    """Whether these turns are others whenever they are played again."""
    reward_start: float = 0.2
    reward_gain: float = 0.02
    """Probability that a completion is right: `reward_start`, plus this much per policy."""
    ungradable_share: float = 0.0


Fabricates = str | Callable[[SubmissionOrder], str]


@dataclass
class Setting:
    """A model's view of its peer."""

    disk: SimulatedDisk
    hardware: Hardware
    workload: Workload
    tell: Callable[..., None] = lambda _what, **_facts: None
    """Reports the model's true actions to the invariants: tell("trained", …)."""
    fabricates: Fabricates = ""
    """What an adversary's engine delivers, or a function that says it for each submission: rollouts
    of other "weights" or "prompts", one "row" of other weights, programs without a model that are
    slow to grade ("sleepers"), "edits" of a few tokens, "garbage", or "poison", which kills an
    inspector, or "turns" of another episode, or "a failure" of its environment, or "no sandbox" for
    it, instead. A validator's "approval" finds everything right, and its "refusal" nothing. A
    trainer's contributions hold "nan", are too "large", or have "claims" of more tokens than any
    inner steps train on, or are "noise"."""

    def fabricated(self, order: SubmissionOrder) -> str:
        return self.fabricates if isinstance(self.fabricates, str) else self.fabricates(order)
