"""The program that builds the walls from within, then starts the untrusted program behind them.

Run as `python -I -S inside.py CONTROL SPEC`; it imports only the standard library. CONTROL is a
socket to `peers.sandbox.execute`, SPEC a file with a JSON object. Three processes: the outermost
creates the namespaces and waits; the first process of the new process namespace (its init) builds
the root folder, drops every privilege, reaps orphans and reports; its child becomes the untrusted
program. The program inherits no file but its three streams, so it cannot write a report.
"""

import base64
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEW: USER, NS (mounts), PID, NET, IPC, UTS."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
MNT_DETACH = 2
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_FDCWD, AT_RECURSIVE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH = (
    1, -100, 0x8000, 0x1000, 4,
)  # fmt: skip
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522
CAPABILITIES = 64
NOBODY = 65534
DEVICES = ("null", "zero", "full", "random", "urandom")
OPEN_FILES = 256
ROOT_BYTES = 1 << 20

Spec = dict[str, Any]

libc = ctypes.CDLL(None, use_errno=True)


def checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def send(control: socket.socket, **message: object) -> None:
    control.send(json.dumps(message).encode())


def mount(kind: str, target: str, flags: int, options: bytes) -> None:
    result = libc.mount(
        kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options
    )
    checked(f"mount {target}", result)


def tmpfs(target: str, size: int, mode: int, flags: int) -> None:
    options = f"size={size},nr_inodes=4096,mode={mode:o}".encode()
    mount("tmpfs", target, MS_NOSUID | MS_NODEV | flags, options)


def set_attributes(descriptor: int, path: bytes, flags: int, attributes: int) -> None:
    argument = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    result = libc.syscall(
        ctypes.c_long(MOUNT_SETATTR), descriptor, path, ctypes.c_uint(flags),
        ctypes.byref(argument), ctypes.c_size_t(ctypes.sizeof(argument)),
    )  # fmt: skip
    checked("mount_setattr", result)


def copied_mount(path: str, attributes: int) -> int:
    """A detached copy of the mount at `path`, with more restrictive attributes."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    result = libc.syscall(ctypes.c_long(OPEN_TREE), AT_FDCWD, path.encode(), ctypes.c_uint(flags))
    descriptor = checked(f"open_tree {path}", result)
    set_attributes(descriptor, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes)
    return descriptor


def attach(descriptor: int, target: str, is_folder: bool) -> None:
    if is_folder:
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    result = libc.syscall(
        ctypes.c_long(MOVE_MOUNT), descriptor, b"", AT_FDCWD, target.encode(),
        ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH),
    )  # fmt: skip
    checked(f"move_mount {target}", result)
    os.close(descriptor)


def build_root(spec: Spec) -> None:
    """Replace the root folder by a read-only one that holds what the interpreter needs."""
    libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    attributes = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
    shown = [(path, Path(path).is_dir(), copied_mount(path, attributes)) for path in spec["shown"]]
    # Devices keep working on a read-only mount, but not on one without devices.
    shown += [
        (f"/dev/{name}", False, copied_mount(f"/dev/{name}", ATTR_RDONLY | ATTR_NOSUID))
        for name in DEVICES
    ]
    new = "/tmp"
    tmpfs(new, ROOT_BYTES, 0o755, 0)
    for path, is_folder, descriptor in shown:
        attach(descriptor, new + path, is_folder)
    for path, target in spec["links"]:
        Path(new + path).symlink_to(target)
    for path in spec["hidden"]:
        tmpfs(new + path, 4096, 0o555, MS_RDONLY)
    Path(new, "tmp").mkdir()
    tmpfs(f"{new}/tmp", spec["files_bytes"], 0o777, 0)
    os.chdir(new)
    # The old root ends up over the new one, and is then detached.
    checked("pivot_root", libc.pivot_root(b".", b"."))
    checked("umount2", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    set_attributes(AT_FDCWD, b"/", 0, ATTR_RDONLY)


def drop_privileges(switch_user: bool) -> None:
    if switch_user:
        os.setgroups([])
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    if switch_user:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    checked("capset", libc.capset(header, (ctypes.c_uint32 * 6)()))
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, one, zero, zero, zero))


def die_with_parent() -> None:
    checked("prctl", libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0))


def limit_resources(spec: Spec) -> None:
    cpu = spec["cpu_seconds"]
    bounds = {
        resource.RLIMIT_AS: spec["memory_bytes"],
        resource.RLIMIT_DATA: spec["memory_bytes"],
        # This program's two outer processes may count too.
        resource.RLIMIT_NPROC: spec["processes"] + 2,
        resource.RLIMIT_FSIZE: spec["files_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, bound in bounds.items():
        resource.setrlimit(which, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))


def filter_calls(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    argument = Program(len(program) // 8, program)
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    checked("seccomp", libc.prctl(PR_SET_SECCOMP, mode, ctypes.byref(argument), 0, 0))


def become_program(control: socket.socket, spec: Spec) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        control.set_inheritable(False)
        limit_resources(spec)
        filter_calls(base64.b64decode(spec["filter"]))
        os.execve(spec["argv"][0], spec["argv"], spec["environment"])
    except OSError as error:
        send(control, failed=f"{spec['argv'][0]}: {error.strerror}")
    finally:
        os._exit(127)


def write_files(spec: Spec) -> None:
    for name, content in spec["files"].items():
        path = Path("/tmp", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))
    os.chdir("/tmp")


def serve_as_init(control: socket.socket, spec: Spec) -> None:
    """Start the program, reap until it ends, and report; the kernel then kills the rest."""
    # Signals without a handler do not reach an init from inside its namespace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    libc.prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)
    write_files(spec)
    # The caller watches the init by its descriptor; if it died before, this raises.
    socket.send_fds(control, [b'{"ready": true}'], [os.pidfd_open(os.getpid())])
    if control.recv(16) != b"start":
        os._exit(1)
    program = os.fork()
    if program == 0:
        become_program(control, spec)
    pid, status = 0, 0
    while pid != program:
        pid, status = os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(status)
    send(control, code=code, cpu_seconds=used.ru_utime + used.ru_stime)


def build_and_serve(control: socket.socket, spec: Spec, switch_user: bool) -> NoReturn:
    """What the init does; never returns."""
    try:
        build_root(spec)
        drop_privileges(switch_user)
        serve_as_init(control, spec)
    except OSError as error:
        send(control, failed=f"{error.strerror or error}")
    finally:
        os._exit(0)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        spec = json.load(file)
    die_with_parent()
    try:
        checked("unshare", libc.unshare(ctypes.c_int(NEW_NAMESPACES)))
        send(control, unshared=True)
        mapped = control.recv(16)
        if not mapped:
            return
        die_with_parent()
        init = os.fork()
    except OSError as error:
        send(control, failed=f"{error.strerror or error}")
        return
    if init == 0:
        build_and_serve(control, spec, switch_user=mapped == b"switch")
    control.close()
    os.waitpid(init, 0)


main()
