"""The filter of system calls: a BPF program that the kernel runs at each call. It denies with EPERM
what a program that computes never needs: sockets other than a pair of local ones, tracing, mounts,
kernel keys, new namespaces, and memory that no resource limit counts."""

import errno
import platform
import struct

from swarm.data import beside

_NUMBERS = beside(__file__, dict[str, dict[str, int]])
DENIED = {name: _NUMBERS["both"] | _NUMBERS[name] for name in ("x86_64", "aarch64")}
"""Numbers of the denied system calls by machine, from `seccomp.toml`."""

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_CLONE = {"x86_64": 56, "aarch64": 220}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_CLONE3 = 435

_X32 = 0x40000000
"""Numbers from here on are x86_64's second set of calls, which the lists above do not name."""
_NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW… flags that `clone` takes."""
_AF_UNIX = 1
_TIOCSTI = 0x5412
"""Types into the terminal of whoever started the program."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERROR | errno.EPERM
# The C library then falls back to `clone`, whose flags a filter can read.
_MISSING = _ERROR | errno.ENOSYS


def supported(machine: str = platform.machine()) -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return machine in DENIED


def filter_program(machine: str = platform.machine()) -> bytes:
    """The BPF program, as the array of `sock_filter` that `prctl` takes."""
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _DENY),
    ]
    for number in sorted(DENIED[machine].values()):
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _DENY)]
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _MISSING)]
    lines += _on(_SOCKETPAIR[machine], _FIRST_ARGUMENT, (_EQUAL, 1, 0, _AF_UNIX))
    lines += _on(_CLONE[machine], _FIRST_ARGUMENT, (_ANY_BIT, 0, 1, _NEW_NAMESPACES))
    lines += _on(_IOCTL[machine], _SECOND_ARGUMENT, (_EQUAL, 0, 1, _TIOCSTI))
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _on(
    number: int, argument: int, test: tuple[int, int, int, int]
) -> list[tuple[int, int, int, int]]:
    """Deny call `number` unless `test`, applied to an argument, jumps over the denial."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, argument),
        test,
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
