"""Tasks and their verifiers: what a run trains on. Imports neither torch nor transformers.

For other rooms: `__init__`: Environment, Generated, Grade, NotGradable, Renderer, SingleTurn, Task,
Transcript, episodes_of, grade, load, probe_hash, task_of; `chat_template`: ChatTemplate,
ChatTokens; `collection`: Environments, GroupTask; `columns`: Row, flat, value_of; `dataset`:
DataOptions, Dataset, DatasetOptions, FIELD, OfRows, Pairs, prompt_columns, prompt_in, prompt_of,
text_in; `episodes`: EpisodeLimits, Replies, demonstrate, grade_segments, transcript_of;
`graders.pool`: Pool, ProcessFailed, ServiceError, starter; `interface`: Conversation, Environment,
Episodes, Grade, Message, NotGradable, Prompt, ScaledOptions, SingleTurn, Split, Task, Tasks,
ToolMessage, Transcript, UnusableTask, Wrapper, as_text, episodes_of, messages_of, with_text;
`kept`: Kept, kept_row; `pairs`: json_pairs; `play`: *, Observation; `probe`: PROBE_TASKS,
probe_hash, probe_seed; `prompt_room`: ModelFacts, PromptRoom, shorter_answers; `registry`:
load_any, load_named; `renderer`: Renderer, read_files, stop_ids_of; `row_check`: first_rows;
`rows`: Rows, SUFFIXES, chosen_files, located; `run_probe`: change_of_history, described, model_of,
probe_hashes, try_grading; `tasks`: Generated, Numbered, indexed; `terminal.problem`: Check,
Problem; `verifiers.installed`: OPENENV, homes
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
