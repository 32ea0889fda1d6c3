"""Tasks and their verifiers: what a run trains on. Imports neither torch nor transformers.

For other rooms, by the names in docs/rooms.md: `__init__`, `chat_template`, `collection`,
`columns`, `dataset`, `episodes`, `graders.pool`, `interface`, `kept`, `pairs`, `play`, `probe`,
`prompt_room`, `registry`, `renderer`, `row_check`, `rows`, `run_probe`, `tasks`,
`terminal.problem`, `verifiers.installed`
"""

from peers.environments.interface import (
    Environment,
    Episodes,
    Grade,
    Message,
    NotGradable,
    SingleTurn,
    Task,
    Tasks,
    Transcript,
    Turn,
    Wrapper,
    episodes_of,
)
from peers.environments.play import Episode, grade, task_of
from peers.environments.probe import probe_hash
from peers.environments.registry import load
from peers.environments.renderer import Renderer
from peers.environments.tasks import Generated, TaskList, split_of

__all__ = [
    "Environment",
    "Episode",
    "Episodes",
    "Generated",
    "Grade",
    "Message",
    "NotGradable",
    "Renderer",
    "SingleTurn",
    "Task",
    "TaskList",
    "Tasks",
    "Transcript",
    "Turn",
    "Wrapper",
    "episodes_of",
    "grade",
    "load",
    "probe_hash",
    "split_of",
    "task_of",
]
