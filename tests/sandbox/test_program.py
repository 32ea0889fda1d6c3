"""What a sandbox is asked to run, and how it answers."""

from __future__ import annotations

import struct

import pytest

from peers.sandbox import PYTHON, Limits, Program, SandboxError, run, why_none
from peers.sandbox.run import check
from peers.sandbox.seccomp import DENIED, filter_program
from swarm.errors import UserError

works = pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "give either argv or source"),
        ({"argv": (PYTHON,), "source": "pass"}, "give either argv or source"),
        ({"argv": ("a\0b",)}, "remove the NUL"),
        ({"source": "pass", "files": {"../x": b""}}, "leaves the working folder"),
        ({"source": "pass", "files": {"/x": b""}}, "leaves the working folder"),
        ({"source": "pass", "files": {"": b""}}, "leaves the working folder"),
        ({"source": "pass", "files": {"program.py": b""}}, "is the name of the source"),
    ],
)
def test_a_wrong_program_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Program(**wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", 0),
        ("seconds", float("nan")),
        ("cpu_seconds", -1.0),
        ("memory_bytes", 1.5),
        ("processes", 0),
    ],
)
def test_a_wrong_limit_is_refused(name, value):
    with pytest.raises(UserError, match=f"{name} is {value}; set a positive"):
        Limits(**{name: value})


def test_without_a_sandbox_the_error_says_what_to_allow():
    with pytest.raises(UserError, match=r"\(not permitted\), .* no fault .*; allow user namesp"):
        check("not permitted")


@works
def test_streams_code_and_files_come_through():
    program = Program(
        argv=(PYTHON, "main.py", "3"),
        stdin=b"4\n",
        files={
            "main.py": b"import sys, inner.module as m\n"
            b"print(m.product(int(sys.argv[1]), int(input())))\n"
            b"print('warned', file=sys.stderr)\nsys.exit(5)",
            "inner/module.py": b"def product(a, b): return a * b",
        },
    )
    outcome = run(program)
    assert (outcome.status, outcome.code) == ("exited", 5)
    assert (outcome.stdout, outcome.stderr) == (b"12\n", b"warned\n")
    assert 0 < outcome.cpu_seconds < Limits().cpu_seconds


@works
def test_large_streams_do_not_block():
    data = bytes(range(256)) * 2000
    program = Program(
        source="import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=data
    )
    assert run(program).stdout == data


@works
def test_a_signal_is_reported():
    outcome = run(Program(source="import os; os.kill(os.getpid(), 15)"))
    assert (outcome.status, outcome.code) == ("signalled", 15)


@works
def test_a_program_that_does_not_exist_is_an_error():
    with pytest.raises(SandboxError, match="/nowhere: No such file"):
        run(Program(argv=("/nowhere",)))


@works
def test_installed_packages_are_hidden():
    assert run(Program(source="import pip")).code == 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_denies_each_listed_call(machine):
    program = filter_program(machine)
    numbers = set(DENIED[machine].values())
    assert len(numbers) == len(DENIED[machine])
    decisions = {number: _decide(program, machine, number) for number in range(500)}
    assert {n for n, decision in decisions.items() if decision == "deny"} >= numbers
    assert decisions[435] == "missing"
    assert sum(decision == "allow" for decision in decisions.values()) > 400
    assert _decide(program, machine, 0x40000001) == "deny"
    other = "aarch64" if machine == "x86_64" else "x86_64"
    assert _decide(program, other, 1) == "kill"


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 56), ("aarch64", 220)])
def test_the_filter_reads_the_flags_of_clone(machine, number):
    program = filter_program(machine)
    for bit in range(32):
        namespace = bit in (17, 25, 26, 27, 28, 29, 30)
        expected = "deny" if namespace else "allow"
        assert _decide(program, machine, number, (1 << bit) | 17) == expected


def _decide(program: bytes, machine: str, number: int, first: int = 0, second: int = 0) -> str:
    """Interpret the filter as the kernel does, for the instructions that it uses."""
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    data = {0: number, 4: 0xC000003E if machine == "x86_64" else 0xC00000B7, 16: first, 24: second}
    at, register = 0, 0
    while True:
        operation, yes, no, value = code[at]
        at += 1
        if operation == 0x20:
            register = data[value]
        elif operation == 0x06:
            kinds = {0x7FFF0000: "allow", 0x80000000: "kill", 0x50001: "deny", 0x50026: "missing"}
            return kinds[value]
        else:
            tests = {0x15: register == value, 0x35: register >= value, 0x45: register & value != 0}
            at += yes if tests[operation] else no
