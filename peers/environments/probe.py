"""The probe hash, which shows that two machines render an environment's tasks alike."""

import blake3

from peers.environments.interface import Environment
from peers.environments.play import task_of
from peers.environments.prompt_room import PromptRoom
from peers.environments.renderer import Renderer
from swarm.rollouts.seeds import digest

PROBE_TASKS = 64


def probe_seed(index: int) -> bytes:
    return digest("swarm/1/probe", index.to_bytes(4, "big"))


def probe_hash(environment: Environment, renderer: Renderer) -> bytes:
    """BLAKE3-256 over the token ids of 64 probe tasks: two machines with equal hashes render alike.

    Each task adds three items: the token ids of its prompt, those of its answer (each list as a
    4-byte big-endian count and 4-byte big-endian ids), and its target length (4 bytes, big endian).
    If a prompt is of messages, the hash of the chat template follows."""
    hasher = blake3.blake3(b"swarm/1/probe")
    is_chat, room = False, PromptRoom(renderer)
    for index in range(PROBE_TASKS):
        task = task_of(environment, probe_seed(index), room=room)
        for tokens in (room.encode(task.prompt), renderer.encode_completion(task.answer)):
            hasher.update(b"".join(n.to_bytes(4, "big") for n in (len(tokens), *tokens)))
        hasher.update(task.target_length.to_bytes(4, "big"))
        is_chat = is_chat or not isinstance(task.prompt, str)
    if is_chat:
        hasher.update(renderer.chat.fingerprint())
    return hasher.digest()
