"""Graders: what is right, what earns nothing and why, and what is not gradable."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.environments import NotGradable
from peers.environments.graders import make_grader
from peers.environments.graders.math import ANSWER_CHARACTERS_MAX, boxed, too_complex, unit_of
from peers.environments.graders.plain import number_in
from peers.environments.graders.pool import Overdue, Pool, ProcessFailed, ServiceError
from swarm.errors import UserError
from swarm.world import landlock
from swarm.world.process import INSTALLED_VARIABLE
from tests.environments.junk import KINDS, junk

MATH = make_grader("math")


def reward(grader: str, text: str, answer: str, **options) -> float:
    return make_grader(grader, options).grade(text, answer, {}).reward


# --- by name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "maths"}, "grader 'maths' is unknown; there are: code, exact, json, math"),
        ({"name": "exact", "options": {"x": 1}}, "unknown key 'x'; there are: ignore_case"),
        ({"name": "math", "options": {"x": 1}}, "unknown key 'x'"),
        ({"name": "number", "options": {"tolerance": -1}}, "tolerance is -1"),
    ],
)
def test_a_wrong_request_is_one_sentence(arguments, says):
    with pytest.raises(UserError, match=says):
        make_grader(**arguments)


# --- without a library -----------------------------------------------------------------------


def test_exact():
    assert reward("exact", " Paris\n", "Paris") == 1
    assert reward("exact", "paris", "Paris") == 0
    assert reward("exact", "paris", "Paris", ignore_case=True) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 12 and then 1,234.50.", "2469/2"),
        ("#### -7", "-7"),
        ("it is 3/4", "3/4"),
        ("1,23", "23"),
        ("5/0", None),
        ("none", None),
        ("9" * 101, None),
        ("٣", None),
        ("12²", None),
        ("12٣", None),
        ("٣12", None),
        ("1.1.1", None),
        ("5-3", "-3"),
        ("\u22123", "-3"),
        ("\uff15", "5"),
        ("1.6e-19", "1/6250000000000000000"),
        ("so 6 \\times 10^{5}.", "600000"),
        ("7 * 10**2", "700"),
        ("10^3", "1000"),
        ("x^3", None),
        ("2e3x", "3"),
    ],
)
def test_the_last_number_of_a_text(text, value):
    found = number_in(text)
    assert (None if found is None else str(found)) == value


def test_number():
    assert reward("number", "about 0.5", "1/2") == 1
    assert reward("number", "0.51", "1/2") == 0
    assert reward("number", "0.51", "1/2", tolerance=0.02) == 1
    assert make_grader("number").grade("dunno", "1", {}).parts == {"no number": 1.0}
    with pytest.raises(NotGradable, match="the answer 'Paris' holds no number"):
        reward("number", "1", "Paris")


@settings(max_examples=30)
@given(st.text())
def test_number_reads_any_text(text):
    number_in(text)


@pytest.mark.parametrize("text", ["10^5" + " " * 1000 + "a", "10" + " " * 1000, " " * 1000 + "x"])
def test_white_space_takes_a_number_no_time(text):
    began = time.process_time()
    number_in(text)
    assert time.process_time() - began < 1  # 3 s where each part could take the white space


# --- math ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {\{1\}}", r"\{1\}"),
        (r"\fbox{3} \fboxed{4}", "4"),
        (r"\boxed{1", None),
        (r"\boxed{ }", None),
        ("1", None),
    ],
)
def test_the_last_box(text, content):
    assert boxed(text) == content


@settings(max_examples=30)
@given(st.text(alphabet="\\boxed{}12 ", max_size=60))
def test_what_a_box_holds_is_in_the_text(text):
    content = boxed(text)
    assert content is None or (content in text and "boxed" in text)


def test_bounds_look_at_the_text_only():
    assert not too_complex(r"\frac{-b\pm\sqrt{b^2-4ac}}{2a}")
    for answer in (
        "1" * 61,
        "(" * 13,
        "1+" * 61,
        "x" * (ANSWER_CHARACTERS_MAX + 1),
        "x" + "!" * 17,
    ):
        assert too_complex(answer)
    assert too_complex(r"\binom{100000}{2}") and not too_complex(r"\binom{100}{2}")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("1/2", r"\frac12"),
        ("0.5", r"\frac{1}{2}"),
        (r"\boxed{7}", "7"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sqrt{8}", r"2\sqrt2"),
        ("5000", r"5\,000"),
        ("(1,2)", "(1,2)"),
        ("5", "x=5"),
        (r"\int x dx", r"\int x dx"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\gcd(a, b)", r"\gcd(a, b)"),
        (r"\text{north}", r"\text{North}"),
    ],
)
def test_equal_answers(answer, text):
    assert MATH.grade(f"So \\boxed{{{text}}}.", answer, {}).reward == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("5", "no boxed answer"),
        (r"\boxed{6}", None),
        (r"\boxed{2+3}", "unevaluated"),
        (r"\boxed{5 \ldots}", "unreadable"),
        ("\\boxed{\ud800}", "unreadable"),
        (r"\boxed{}\boxed{\frac}", "unreadable"),
        (r"\boxed{9^{9^{9^9}}}", "too complex"),
        (r"\boxed{100000!}", "too complex"),
        (r"\boxed{\gcd(18602118!, 7)}", "too complex"),
        (r"\boxed{\operatorname{zeros}(9999, 9999)}", "too complex"),
        (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", "unevaluated"),
        (r"\boxed{\sum_{i=1}^{10^9} \frac1i}", "unevaluated"),
        (r"\boxed{" + "{" * 10**6 + "}" * 10**6 + "}", "too complex"),
    ],
)
def test_why_an_answer_earns_nothing(text, reason):
    grade = MATH.grade(text, "5", {})
    assert grade.reward == 0 and list(grade.parts) == ([reason] if reason else [])


def test_a_number_is_written_as_one():
    for text in ("1/2", "0.5", r"x=\frac{2}{4}", r"50\%", r"-\frac{-1}{2}"):
        assert reward("math", f"\\boxed{{{text}}}", r"\frac{1}{2}") == 1
    for text, right in ((r"5\text{ km}", 0), ("5 m", 0), (r"5\,\mathrm{cm}^2", 0), ("5", 1),
                        (r"5\text{ centimeters}", 1), (r"5\text{ balls}", 1)):  # fmt: skip
        assert reward("math", f"\\boxed{{{text}}}", r"5\text{ cm}") == right, text
    assert unit_of(r"\frac{1}{2}gh") == (r"\frac{1}{2}gh", ()), "no units, but symbols"
    assert reward("math", r"\boxed{1-0.5}", "1/2") == 0
    assert reward("math", r"\boxed{\frac{2\pi}{4}}", r"\frac{\pi}{2}") == 1


def test_an_answer_of_the_data_that_is_unreadable_is_not_the_models_fault():
    with pytest.raises(NotGradable, match=r"the task's own answer '9\^\{9\^\{9\}\}'"):
        MATH.grade(r"\boxed{1}", "9^{9^{9}}", {})


@pytest.mark.parametrize(
    "count", [len(KINDS), pytest.param(40 * len(KINDS), marks=pytest.mark.slow)]
)
def test_junk_earns_nothing(count):
    for _, gold, text in junk(count, seed=1):
        assert MATH.grade(text, gold, {}).reward == 0


# --- processes -------------------------------------------------------------------------------


SERVICE = "tests.environments.grader_service:Service"


@pytest.fixture(scope="module")
def pool():
    pool = Pool(SERVICE, timeout_seconds=20, memory_bytes=64 << 20)
    yield pool
    pool.close()


def test_a_process_is_kept_and_sees_no_secrets(pool, monkeypatch):
    """All have one hash seed, so that libraries that iterate over sets do the same."""
    monkeypatch.setenv("SECRET", "s")
    first, second = pool.ask(["ok"]), pool.ask(["ok"])
    assert first == second and first[1] is None
    other = Pool(SERVICE, timeout_seconds=20)
    assert other.ask(["ok"])[2] == first[2]
    other.close()


def test_a_process_that_hangs_is_replaced(pool):
    before = pool.ask(["ok"])[0]
    begun = time.monotonic()
    with pytest.raises(Overdue, match=r"still answering after 0\.2 s and was killed"):
        pool.ask(["hang"], timeout_seconds=0.2)
    assert time.monotonic() - begun < 10
    after = pool.ask(["ok"])
    assert after[0] != before


def test_a_request_has_a_bound_in_cpu_time_alone():
    """Wall time would make an answer ungradable where the machine is busy."""
    pool = Pool(SERVICE, timeout_seconds=60, cpu_seconds=0.1)
    try:
        before = pool.ask(["ok"])[0]
        with pytest.raises(Overdue, match=r"took more than 0\.1 s of CPU time and was killed"):
            pool.ask(["hang"])
        assert pool.ask(["ok"])[0] != before and pool.replaced == 1, "it is not tried again"
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("request_", "says"),
    [(["memory"], "all of its 64 MiB of memory"), (["die"], "it ended by SIGKILL")],
)
def test_a_process_that_fails_is_replaced(pool, request_, says):
    replaced = pool.replaced
    with pytest.raises(ProcessFailed, match=says):
        pool.ask(request_)
    assert pool.replaced > replaced
    assert pool.ask(["ok"])


def test_an_exception_ends_no_process(pool, tmp_path):
    before = pool.ask(["ok"])
    with pytest.raises(ServiceError, match="ValueError: no"):
        pool.ask(["raise"])
    with pytest.raises(ServiceError, match=r"^the whole sentence$"):
        pool.ask(["refuse"])
    with pytest.raises(ServiceError, match="PermissionError"):
        pool.ask(["connect"])
    with pytest.raises(ServiceError, match="File too large"):
        pool.ask(["write", str(tmp_path / "file")])
    assert pool.ask(["ok"]) == before


def test_a_service_that_cannot_be_loaded_says_why():
    pool = Pool("no_such_module:Service", timeout_seconds=20)
    with pytest.raises(ProcessFailed, match="No module named 'no_such_module'"):
        pool.ask(["ok"])
    pool.close()


@pytest.mark.skipif(landlock.version() < landlock.OLDEST, reason="the kernel has no Landlock")
def test_a_process_cannot_read_the_keys_of_the_peer(tmp_path, monkeypatch):
    for name in ("identity.key", "data"):
        (tmp_path / name).write_text("17")
    monkeypatch.setenv(INSTALLED_VARIABLE, str(tmp_path / "environments"))
    pool = Pool(SERVICE, timeout_seconds=20)
    assert pool.ask(["read", str(tmp_path / "data")]) == "17"
    with pytest.raises(ServiceError, match="PermissionError"):
        pool.ask(["read", str(tmp_path / "identity.key")])
    pool.close()
