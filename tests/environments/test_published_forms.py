"""The blocks of `docs/data.md`, run from the page on records of our own in the published forms.

The forms are those of the data cards on the hub that the page links to, and of verl's
`examples/data_preprocess/gsm8k.py`. No text of a record is from a data set.
"""

from __future__ import annotations

import json
import tomllib
from base64 import b64encode
from pathlib import Path
from pickle import dumps
from typing import Any
from zlib import compress

import pytest

from peers.environments import Transcript, grade, load
from peers.environments.interface import as_text, messages_of
from peers.environments.play import indexed_tasks
from swarm.run.toml import RunHashes, describe_run, manifest_from_toml
from tests.docs.pages import code_blocks, text
from tests.environments.test_rows import write

Record = dict[str, Any]

TESTS = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}
PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
CALLS = [
    {"input": "1\n2", "output": "3", "testtype": "functional"},
    {"input": "5\n5", "output": "10", "testtype": "functional"},
]
ADD, WRONG = "def add(a, b): return a + b", "def add(a, b): return 3"


def chat(content: str, *more: str) -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": each} for role, each in zip(roles, (content, *more))]  # noqa: B905


def numina(n: int, answer: str, **other: Any) -> Record:
    return {
        "problem": f"What is {n} plus {n}?",
        "solution": f"Both add up to $\\boxed{{{2 * n}}}$.",
        "answer": answer,
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "problem_is_valid": "Yes",
        "solution_is_valid": "Yes",
        "source": "olympiads",
        "synthetic": False,
        **other,
    }


def verl(n: int, source: str, ability: str, truth: str, prompt: list[dict[str, str]]) -> Record:
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": n, "split": "train"},
    }


def genesys(n: int, kind: str, info: Record, **other: Any) -> Record:
    return {
        "problem_id": f"{kind}_{n}",
        "task_type": kind,
        "prompt": f"Problem {n}",
        "verification_info": json.dumps(info),
        "metadata": "{}",
        **other,
    }


ANSWER = "The answer is \\boxed{14}."
MIX = [
    verl(0, "numina_olympiads", "math", "14", chat("7 plus 7?")),
    verl(1, "taco", "code", json.dumps(TESTS), chat("Add the numbers.")),
]
SYNTHETIC_1 = {"source": "own", "in_source_id": "1", "gold_standard_solution": "14", "score": 1.0}
FORMS: dict[str, tuple[str, list[Record], list[tuple[int, str, str]]]] = {
    # The file, its records, and for each environment of the block: tasks, a right and a wrong text.
    "openai/gsm8k": (
        "main/train-00000-of-00001.parquet",
        [{"question": "7 plus 7?", "answer": "7 + 7 = <<7+7=14>>14\n#### 14"}],
        [(1, "It is 14", "It is 15")],
    ),
    "EleutherAI/hendrycks_math": (
        "algebra/train-00000-of-00001.parquet",
        [
            {"problem": f"{n}?", "level": f"Level {n}", "type": "Algebra", "solution": ANSWER}
            for n in range(1, 6)
        ],
        [(3, "\\boxed{14}", "\\boxed{15}")],
    ),
    "AI-MO/NuminaMath-1.5": (
        "data/train-00000-of-00002.parquet",
        [
            numina(7, "14"),
            numina(1, "proof"),
            numina(2, "notfound"),
            numina(3, "proof", question_type="proof"),
            numina(4, "8", problem_is_valid="Problem not solved"),
        ],
        [(1, "\\boxed{14}", "\\boxed{15}")],
    ),
    "AI-MO/NuminaMath-CoT": (
        "data/train-00000-of-00005.parquet",
        [
            {"source": source, "problem": "p", "solution": ANSWER, "messages": chat("7+7?", ANSWER)}
            for source in ("olympiads", "cn_k12", "amc_aime")
        ],
        [(2, "\\boxed{14}", "\\boxed{15}")],
    ),
    "agentica-org/DeepScaleR-Preview-Dataset": (
        "deepscaler.json",
        [{"problem": "7+7?", "answer": "14", "solution": ANSWER}],
        [(1, "\\boxed{14}", "\\boxed{15}")],
    ),
    "open-r1/OpenR1-Math-220k": (
        "data/train-00000-of-00010.parquet",
        [
            {**numina(7, "14"), "correctness_count": n, "generations": ["…"], "uuid": "u"}
            for n in range(3)
        ],
        [(2, "\\boxed{14}", "\\boxed{15}")],
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        "data/dapo-math-17k.parquet",
        [verl(0, "math_dapo", "MATH", "14", chat("7+7? End with a line Answer: $Answer"))],
        [(1, "Answer: 14", "Answer: 15")],
    ),
    "PRIME-RL/Eurus-2-RL-Data": (
        "train.parquet",
        MIX,
        [(1, "\\boxed{14}", "\\boxed{15}"), (1, PROGRAM, "```python\nprint(3)\n```")],
    ),
    "PrimeIntellect/SYNTHETIC-1": (
        "data/train-00000-of-00100.parquet",
        [
            genesys(0, "verifiable_math", {"ground_truth": "14"}, **SYNTHETIC_1),
            genesys(1, "llm_judgeable_groundtruth_similarity", {}, **SYNTHETIC_1),
        ],
        [(1, "\\boxed{14}", "\\boxed{15}")],
    ),
    "PrimeIntellect/SYNTHETIC-2": (
        "data/train-00000-of-00090.parquet",
        [
            {
                "problem_id": f"p{n}",
                "prompt": "7+7?",
                "verification_info": json.dumps({"ground_truth": "14"} if n else TESTS),
                "Qwen/Qwen3-4B_responses": ["…"],
                "Qwen/Qwen3-4B_avg_reward": n / 4,
            }
            for n in range(5)
        ],
        [(2, "\\boxed{14}", "\\boxed{15}")],
    ),
    "PrimeIntellect/Intellect-2-RL-Dataset": (
        "data/train-00000-of-00008.parquet",
        [
            genesys(n, kind, info, solve_rate_qwen_r1_distill_7b=n / 8)
            for n in range(9)
            for kind, info in (
                ("verifiable_math", {"ground_truth": "14"}),
                ("prime_rl_code", {"test_cases": json.dumps(TESTS), "fn_name": None}),
            )
        ],
        [(8, f"{PROGRAM}\n\\boxed{{14}}", "\\boxed{15}")],
    ),
    "codeparrot/apps": (
        "train.jsonl",
        [{"problem_id": 0, "question": "Add.", "input_output": json.dumps(TESTS)}],
        [(1, PROGRAM, "print(3)")],
    ),
    "deepmind/code_contests": (
        "data/train-00000-of-00039.parquet",
        [
            {
                "description": "Add.",
                "public_tests": {"input": ["1 2"], "output": ["3"]},
                "private_tests": {"input": [], "output": []},
                "generated_tests": {"input": ["5 5"], "output": ["10"]},
            }
        ],
        [(1, PROGRAM, "print(3)")],
    ),
    "agentica-org/DeepCoder-Preview-Dataset": (
        "lcbv5/train-00000-of-00001.parquet",
        [
            {
                "problem": "Add.",
                "tests": json.dumps([{**each, "metadata": {"func_name": "add"}} for each in CALLS]),
            }
        ],
        [(1, ADD, WRONG)],
    ),
    "/data/livecodebench/test6.jsonl": (
        "test6.jsonl",
        [
            {
                "question_content": "Add.",
                "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n",
                "public_test_cases": json.dumps(CALLS[:1]),
                "private_test_cases": b64encode(compress(dumps(json.dumps(CALLS[1:])))).decode(),
                "metadata": json.dumps({"func_name": "add"}),
            }
        ],
        [(1, ADD, WRONG)],
    ),
    "google-research-datasets/mbpp": (
        "full/train-00000-of-00001.parquet",
        [{"text": "Add.", "test_list": ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]}],
        [(1, ADD, WRONG)],
    ),
    "openai/openai_humaneval": (
        "openai_humaneval/test-00000-of-00001.parquet",
        [
            {
                "prompt": "def add(a: int, b: int) -> int:\n",
                "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
                "    assert candidate(5, 5) == 10\n",
                "entry_point": "add",
            }
        ],
        [(1, ADD, WRONG)],
    ),
    "/data/gsm8k/train.parquet": (
        "train.parquet",
        [verl(0, "openai/gsm8k", "math", "14", chat("7+7? Output the answer after ####")), *MIX],
        [(1, "#### 14", "#### 15")],
    ),
    "PrimeIntellect/INTELLECT-3-RL": (
        "math/train-00000-of-00001.parquet",
        [
            {"question": "7+7?", "answer": "14", "avg@8_qwen3_4b_instruct_2507": n / 4}
            for n in range(5)
        ],
        [(2, "\\boxed{14}", "\\boxed{15}")],
    ),
    "trl-lib/DeepMath-103K": (
        "data/train-00000-of-00001.parquet",
        [{"prompt": chat("7+7?"), "solution": "14"}],
        [(1, "\\boxed{14}", "\\boxed{15}")],
    ),
}
BLOCKS = code_blocks(text("docs/data.md"), "toml")


def path_of(block: str) -> str:
    return str(tomllib.loads(block)["environments"][0]["options"]["path"])


def test_every_form_has_its_block() -> None:
    assert [path_of(block) for block in BLOCKS] == list(FORMS)


@pytest.mark.parametrize("block", BLOCKS, ids=path_of)
def test_a_published_form_is_read_by_its_block(block: str, tmp_path: Path) -> None:
    published = path_of(block)
    name, records, wanted = FORMS[published]
    file = tmp_path / "set" / name
    if file.suffix == ".json":
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(records))
    else:
        write(file, records)
    here = file if published.startswith("/") else tmp_path / "set"
    run = tmp_path / "run.toml"
    run.write_text('model = "m"\n' + block.replace(f'"{published}"', f'"{here}"'))
    references = describe_run(run).environments
    for reference, (count, right, wrong) in zip(references, wanted, strict=True):
        environment = load(reference.name, reference.version, reference.options)
        tasks = indexed_tasks(environment)
        assert tasks is not None and tasks.count == count
        for index in range(count):
            task = tasks.at(index)
            assert as_text(task.prompt).strip() and "{" not in as_text(task.prompt)[:12]
            for said, reward in ((right, 1), (wrong, 0)):
                assert grade(environment, task, Transcript.of(said)).reward == reward, published


@pytest.mark.parametrize("page", ["from-verl", "from-trl", "from-prime-rl"])
def test_our_config_of_a_page_for_switching_is_a_run(page: str, tmp_path: Path) -> None:
    (block,) = code_blocks(text(f"docs/{page}.md"), "toml")
    run = tmp_path / "run.toml"
    run.write_text(block)
    manifest = manifest_from_toml(run, RunHashes(tokenizer=bytes(32), probes=[bytes(32)]))
    (reference,) = manifest.environments
    published = str(reference.options["path"])
    name, records, _ = FORMS[published]
    here = write(tmp_path / "set" / name, records)
    place = str(here if published.endswith(".parquet") else tmp_path / "set")
    tasks = indexed_tasks(load("dataset", "1", {**reference.options, "path": place}))
    assert tasks is not None and messages_of(tasks.at(0).prompt)[-1].content
