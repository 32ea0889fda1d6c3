from __future__ import annotations

import sys
import time
from pathlib import Path

import trio
import trio.testing

from swarm.world.machine import Machine, free_memory_bytes


async def test_a_correction_moves_the_wall_time_and_adds_up_but_not_the_deadlines() -> None:
    machine = Machine()
    assert abs(machine.wall_time() - time.time()) < 1
    machine.correct_clock(100.0)
    machine.correct_clock(-40.0)
    assert abs(machine.wall_time() - time.time() - 60) < 1
    assert machine.now() == trio.current_time()
    before = machine.now()
    machine.correct_clock(1000.0)
    await trio.sleep(5)
    assert machine.now() == before + 5


def test_secrets_have_the_length_asked_for_and_never_repeat() -> None:
    assert len(Machine().secret_bytes(32)) == 32
    assert Machine().secret_bytes(32) != Machine().secret_bytes(32)


def test_two_machines_draw_different_numbers() -> None:
    assert Machine().random.getrandbits(64) != Machine().random.getrandbits(64)


def test_free_memory_is_the_least_of_machine_and_containers(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert free_memory_bytes(tmp_path) == sys.maxsize  # a system that does not say
    write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:   800 kB\n")
    assert free_memory_bytes(tmp_path) == 800 * 1024
    write("proc/self/cgroup", "0::/outer/inner\n")
    for group, limit in (("outer", "600000"), ("outer/inner", "max")):
        folder = f"sys/fs/cgroup/{group}"
        write(f"{folder}/memory.max", f"{limit}\n")
        write(f"{folder}/memory.current", "500000\n")
        write(f"{folder}/memory.stat", "anon 1\ninactive_file 30000\n")
    assert free_memory_bytes(tmp_path) == 130_000
    assert 0 < free_memory_bytes() < 1 << 50
