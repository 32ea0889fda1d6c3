"""The program that builds the walls from within, then starts the untrusted program behind them.

`peers.sandbox.execute` runs `main` in a bare interpreter. Imports would be most of what a sandbox
costs, hence neither pathlib nor socket nor json. Three processes: the outermost creates the
namespaces and waits; the first process of the new process namespace (its init) builds the root
folder, drops every privilege, reaps orphans and reports; its child becomes the untrusted program.
The program inherits no file but its three streams, so it cannot write a report.

If the files are wanted, the init ends every other process before it reads them.
"""

import ctypes
import errno
import os
import resource
import stat
import sys
from _socket import SCM_RIGHTS, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Spec = dict[str, Any]

SIGINT, SIGKILL, SIGPIPE, SIGXFSZ = 2, 9, 13, 25
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
DEPTH_MAX = 64
"""Folders within each other that a snapshot goes into."""
EPOCH = 1577836800
"""Time of the files that a program finds, so that listings are alike: 1 January 2020."""

libc = ctypes.CDLL(None, use_errno=True)


def checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def send(control: socket, message: str, *descriptors: int) -> None:
    raw = b"".join(each.to_bytes(4, sys.byteorder) for each in descriptors)
    control.sendmsg([message.encode()], [(SOL_SOCKET, SCM_RIGHTS, raw)] if raw else [])


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
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        open(target, "ab").close()
    result = libc.syscall(
        ctypes.c_long(MOVE_MOUNT), descriptor, b"", AT_FDCWD, target.encode(),
        ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH),
    )  # fmt: skip
    checked(f"move_mount {target}", result)
    os.close(descriptor)


def build_root(spec: "Spec") -> None:
    """Replace the root folder by a read-only one that holds what the interpreter needs."""
    libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    attributes = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
    shown = [
        (target, os.path.isdir(path), copied_mount(path, attributes))
        for path, target in spec["shown"]
    ]
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
        os.symlink(target, new + path)
    for path in spec["hidden"]:
        tmpfs(new + path, 4096, 0o555, MS_RDONLY)
    write({f"{new}{name}": content for name, content in spec["sealed"].items()})
    os.mkdir(f"{new}/tmp")
    tmpfs(f"{new}/tmp", spec["files_bytes"], 0o777, 0)
    # Several folders share one bound on their bytes.
    inner = {folder: f"{new}/tmp{folder}" for folder in spec["folders"]}
    for path in inner.values():
        os.makedirs(path)
        os.chown(path, NOBODY, NOBODY)
    copies = {each: copied_mount(path, ATTR_NOSUID | ATTR_NODEV) for each, path in inner.items()}
    for folder, copy in copies.items():
        attach(copy, new + folder, True)
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
    checked("prctl", libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(SIGKILL), 0, 0, 0))


def limit_resources(spec: "Spec") -> None:
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


def become_program(control: socket, spec: "Spec") -> "NoReturn":
    try:
        os.setsid()
        for number in (SIGPIPE, SIGXFSZ, SIGINT):
            libc.signal(number, None)  # the default
        os.set_inheritable(control.fileno(), False)
        limit_resources(spec)
        filter_calls(spec["filter"])
        os.execve(spec["argv"][0], spec["argv"], spec["environment"])
    except OSError as error:
        send(control, f"failed {spec['argv'][0]}: {error.strerror}")
    finally:
        os._exit(127)


def write(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = os.path.join("/tmp", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def write_files(spec: "Spec") -> None:
    for name in spec["made"]:
        os.makedirs(name, exist_ok=True)
    write(spec["files"])
    for name, target in spec["symlinks"].items():
        os.makedirs(os.path.dirname(name), exist_ok=True)
        os.symlink(target, name)
    for name in reversed([*spec["folders"], *spec["made"], *spec["files"], *spec["symlinks"]]):
        when = spec["times"].get(name, EPOCH)
        os.utime(os.path.join("/tmp", name), (when, when), follow_symlinks=False)
    for name, mode in reversed(spec["modes"].items()):
        os.chmod(name, mode)
    os.chdir(spec["folder"])


def found(folder: str) -> list[tuple[str, os.stat_result]]:
    """What is in a folder, as far as it can be read."""
    try:
        os.chmod(folder, 0o700)
    except OSError:
        pass
    try:
        return sorted((each.path, each.stat(follow_symlinks=False)) for each in os.scandir(folder))
    except OSError:
        return []


def snapshot(spec: "Spec") -> bytes | None:
    """The files, links and folders below the writable folders, never through a link: for each a
    line with kind, bytes, permissions, time and path, then its content or target.

    What has an unprintable name, is too deep, or neither file nor link is left out. None if the
    bytes are more than the sandbox may have, as by many links to one file."""
    parts: list[bytes] = []
    left, times = spec["files_bytes"], spec["times"]
    later = max(times.values(), default=EPOCH) + 60
    waiting = [(folder, 0) for folder in spec["folders"]]
    while waiting:
        folder, depth = waiting.pop()
        for path, about in found(folder):
            mode, content = stat.S_IMODE(about.st_mode) & 0o777, b""
            if not path.isprintable():
                continue
            try:
                if stat.S_ISLNK(about.st_mode):
                    kind, content = "link", os.readlink(path).encode()
                elif stat.S_ISDIR(about.st_mode) and depth < DEPTH_MAX:
                    kind = "folder"
                    waiting.append((path, depth + 1))
                elif stat.S_ISREG(about.st_mode):
                    kind = "file"
                    left -= about.st_size
                    if left < 0:
                        return None
                    os.chmod(path, 0o600)
                    with open(path, "rb") as file:
                        content = file.read()
                else:
                    continue
            except (OSError, UnicodeError):
                continue
            # Whatever the clock said: newer than all that was there before.
            when = times.get(path, EPOCH)
            when = when if about.st_mtime == when else later
            parts += [f"{kind} {len(content)} {mode} {when} {path}\n".encode(), content]
    return b"".join(parts)


def send_files(control: socket, spec: "Spec") -> None:
    """End every other process, then send what they leave."""
    try:
        os.kill(-1, SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        pass
    # Nothing may be imported here, such as another codec: the interpreter's own files may be gone.
    raw = snapshot(spec)
    if raw is None:
        return
    files = os.memfd_create("files", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(files), "wb") as file:
        file.write(raw)
    send(control, "files", files)


def serve_as_init(control: socket, spec: "Spec") -> None:
    """Start the program, reap until it ends, and report; the kernel then kills the rest."""
    # Signals without a handler do not reach an init from inside its namespace.
    libc.signal(SIGINT, None)
    die_with_parent()
    libc.prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)
    try:
        write_files(spec)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        send(control, "unfit")
        os._exit(0)
    # The caller watches the init by its descriptor; if it died before, this raises.
    send(control, "ready", os.pidfd_open(os.getpid()))
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
    if spec["returns_tree"]:
        send_files(control, spec)
    send(control, f"ended {code} {used.ru_utime + used.ru_stime}")


def build_and_serve(control: socket, spec: "Spec", switch_user: bool) -> "NoReturn":
    """What the init does; never returns."""
    try:
        build_root(spec)
        drop_privileges(switch_user)
        serve_as_init(control, spec)
    except OSError as error:
        send(control, f"failed {error.strerror or error}")
    finally:
        os._exit(0)


def main(descriptor: int, spec: "Spec") -> "NoReturn":
    """Build a sandbox for a program; `descriptor` is a socket to `peers.sandbox.execute`."""
    control = socket(fileno=descriptor)
    die_with_parent()
    try:
        checked("unshare", libc.unshare(ctypes.c_int(NEW_NAMESPACES)))
        send(control, "unshared")
        mapped = control.recv(16)
        if not mapped:
            os._exit(0)
        die_with_parent()
        init = os.fork()
    except OSError as error:
        send(control, f"failed {error.strerror or error}")
        os._exit(0)
    if init == 0:
        build_and_serve(control, spec, switch_user=mapped == b"switch")
    control.close()
    os.waitpid(init, 0)
    os._exit(0)
