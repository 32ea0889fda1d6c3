"""The filter of system calls: a BPF program that the kernel runs at each call.

It denies what a program that computes never needs: sockets other than a pair of local ones,
tracing, mounts, kernel keys, new namespaces, and memory that no resource limit counts. A denied
call fails with EPERM, so that an honest program sees an ordinary error.
"""

from __future__ import annotations

import errno
import platform
import struct

_COMMON = {
    "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip

DENIED = {
    "x86_64": _COMMON | {
        "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
        "kcmp": 312, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "kexec_load": 246,
        "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
        "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103,
        "iopl": 172, "ioperm": 173, "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321,
        "userfaultfd": 323, "perf_event_open": 298, "unshare": 272, "setns": 308,
        "personality": 135, "sethostname": 170, "setdomainname": 171, "settimeofday": 164,
        "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "modify_ldt": 154,
        "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
    },
    "aarch64": _COMMON | {
        "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
        "kcmp": 272, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "kexec_load": 104,
        "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
        "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89, "quotactl": 60, "syslog": 116,
        "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280,
        "userfaultfd": 282, "perf_event_open": 241, "unshare": 97, "setns": 268,
        "personality": 92, "sethostname": 161, "setdomainname": 162, "settimeofday": 170,
        "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266,
        "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180,
    },
}  # fmt: skip
"""Numbers of the denied system calls by machine, from the kernel's `unistd.h`."""

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
