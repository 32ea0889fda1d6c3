"""What each failed check means for the contributor, and what to do: `swarm why`.

docs/troubleshooting.md has the same words. Names of checks are those in verdicts.
"""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """The explanation of one failed check."""

    means: str
    do: str


_DEFECT = (
    "update Swarm and start the peer again; if it is unchanged and up to date, this is a defect: "
    "please report it with the submission's hash"
)
_LATE = "nothing; if it repeats, your peer or its connection is too slow for the run's steps"
_ENGINE = (
    "start the peer with an empty `checkpoints` folder in its home and with `--engine native`; if "
    "that helps, tell the run's owner which engine and hardware you used before"
)

REFUSALS: dict[str, Refusal] = {
    "admission": Refusal(
        "the validator did not know your peer as admitted: its lease of 60 s had run out, or it "
        "was evicted before the verdict",
        "check that the clock is right (NTP) and the connection stable; for an eviction see "
        "`swarm why PEER`",
    ),
    "entry": Refusal(
        "the prompts and noise were drawn for another admission than the one in force, for example "
        "for the one before a restart",
        "nothing: the peer draws the next submission from its present admission",
    ),
    "step": Refusal(
        "the work came for a step that the run does not know, that the trainer abandoned when it "
        "went back to an earlier policy, or that is too old to be trained on",
        _LATE,
    ),
    "version": Refusal(
        "the peer followed another version of the run manifest than the step order names",
        "nothing: the peer fetches the version itself; if it repeats, start it again",
    ),
    "policy": Refusal("the work names another policy than the step order", _DEFECT),
    "number": Refusal(
        "this number of submission was not yours to deliver now: above the step's maximum, or used "
        "before for another file",
        "nothing; if two peers use copies of one key, give each a home of its own",
    ),
    "trial": Refusal(
        "none of the peer's work was verified yet, so each submission waits for the verdict on the "
        "one before",
        "nothing: the peer delivers it after that verdict",
    ),
    "groups": Refusal("the file has another number of groups than the run asks for", _DEFECT),
    "file": Refusal(
        "the announced file was not at the validator",
        "nothing: the peer pushes it again; if it repeats, check the upload speed",
    ),
    "size": Refusal("the file has another size than the announcement says", _DEFECT),
    "schema": Refusal(
        "the file is not a sound submission: wrong columns, impossible lengths or numbers that are "
        "not finite",
        _DEFECT,
    ),
    "header": Refusal("the file's header contradicts its announcement or the run", _DEFECT),
    "counts": Refusal("rollouts are missing, repeated or out of order", _DEFECT),
    "prompts": Refusal(
        "the prompts are not the ones that your seed determines, so easier ones may have been "
        "chosen",
        "install the version of the environment that `swarm run show` names; your own changes to "
        "its code count as another version",
    ),
    "tokens": Refusal("the text has tokens that the model does not have, or is too long", _DEFECT),
    "spans": Refusal("part of the text claims to come from another policy", _DEFECT),
    "ending": Refusal(
        "a completion continues after its stop token, or ends where neither a stop token nor the "
        "limit ends it",
        _DEFECT,
    ),
    "proof_format": Refusal("a proof has the wrong number of bytes or chunks", _DEFECT),
    "signed_turns": Refusal(
        "a prompt or a turn is not the one that an environment peer signed for this place in this "
        "submission",
        _DEFECT,
    ),
    "turns": Refusal(
        "the environment, run again, answers otherwise than the file says",
        "install the version of the environment that `swarm run show` names",
    ),
    "speed": Refusal(
        "more tokens came under your key than one machine can generate; nothing is counted "
        "against you",
        "run one peer, with a home of its own, on each machine",
    ),
    "evidence": Refusal(
        "what validators recomputed of your work so far differs from the policy by more than "
        "honest rounding explains, and your peer will be evicted if that goes on; this submission "
        "is credited, but nobody trains on it",
        "compare your engine and its precision with what `swarm doctor` says the run tolerates; "
        "set `dtype` to one that was measured, and start the peer with an empty `checkpoints` "
        "folder in its home",
    ),
    "stale": Refusal(
        "the policy was too old to be trained on when the submission's turn came",
        _LATE,
    ),
    "environment": Refusal(
        "the validator's environment could not draw, replay or grade; this is not your fault",
        "nothing",
    ),
    "not_gradable": Refusal(
        "the environment could not know a reward, for a reason that says nothing about your text; "
        "this is not your fault",
        "nothing",
    ),
    "crash": Refusal(
        "three times, the check of this file ended the validator's processes or failed in them",
        "if it repeats at several validators, report it with the file: no honest file should; "
        "until then the validator pauses your peer",
    ),
    "internal": Refusal(
        "the validator itself failed while it judged; this is not your fault", "nothing"
    ),
    "proofs": Refusal(
        "the policy, run again over your text, has other activations than your proofs: other "
        "weights computed them, or the engine rounds too differently",
        _ENGINE,
    ),
    "activations": Refusal(
        "over the whole submission the activations differ more than honest rounding does",
        _ENGINE,
    ),
    "sampling": Refusal(
        "over the whole submission the tokens are not the ones that the policy and your noise "
        "give: another temperature, top-p, quantised weights, or chosen text",
        _ENGINE,
    ),
    "sampling_bound": Refusal(
        "at least one token is not what the policy and your noise give, by more than any rounding",
        _ENGINE,
    ),
    "selection": Refusal(
        "where two tokens are nearly tied, your text takes the one that leads to more reward, to a "
        "stop or to a longer text, more often than chance does",
        _ENGINE,
    ),
}
UNKNOWN = Refusal("this version of Swarm does not know the check", "update Swarm")
