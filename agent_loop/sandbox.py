"""A program that forks a process for every socket that it is sent, and confines it: see processes.py, which starts it.

    python -I sandbox.py [SPEC CONFINED FOLDER...]

Without arguments a process runs the Python code that comes through its socket as {"code": ..., "folder": ...}, and
writes there what it printed. With SPEC (`module:Class`, looked for in FOLDERs too) it makes an object of that class and
calls what comes, a line of JSON each: ["method", argument] in, the answer or {"error": ..., "traceback": ...} out.

What is confined (SPEC: if CONFINED is 1) cannot open sockets, start processes, or reach other processes (a seccomp
filter answers "not permitted"), has no capabilities, opens of the files only the interpreter, the system's libraries
and its folder, in which alone it writes (Landlock), and changes no metadata (the filter). Linux 5.13 on x86-64 only.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import pkgutil
import platform
import resource
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
LONGEST_LINE = 1 << 20
"""Bytes of a call's answer."""

# Names and numbers. No network, no other process, nothing that outlives this one (shared memory, queues, keys) or is
# memory that its limit does not count, no io_uring, which can do the work of the others, and no change of a file by its
# name or of its metadata, neither of which every Landlock covers.
FORBIDDEN = """socket 41, connect 42, bind 49, fork 57, vfork 58, setsid 112, kill 62, tkill 200, tgkill 234,
    rt_sigqueueinfo 129, rt_tgsigqueueinfo 297, pidfd_send_signal 424, pidfd_open 434, pidfd_getfd 438, ptrace 101,
    process_vm_readv 310, process_vm_writev 311, process_madvise 440, migrate_pages 256, move_pages 279,
    prlimit64 302, setpriority 141, ioprio_set 251, sched_setparam 142, sched_setscheduler 144,
    sched_setaffinity 203, sched_setattr 314, shmget 29, shmat 30, shmctl 31, semget 64, semop 65, semctl 66,
    semtimedop 220, msgget 68, msgsnd 69, msgrcv 70, msgctl 71, mq_open 240, memfd_create 319, memfd_secret 447,
    add_key 248, request_key 249, keyctl 250, unshare 272, setns 308, bpf 321, userfaultfd 323, perf_event_open 298,
    io_uring_setup 425, truncate 76, chmod 90, fchmod 91, fchmodat 268, fchmodat2 452, chown 92, fchown 93,
    lchown 94, fchownat 260, utime 132, utimes 235, futimesat 261, utimensat 280, setxattr 188, lsetxattr 189,
    fsetxattr 190, removexattr 197, lremovexattr 198, fremovexattr 199, setxattrat 463, removexattrat 466,
    file_setattr 469"""
# Their arguments are structs, which a filter cannot read; libc then takes clone and openat.
UNKNOWN = {"clone3": 435, "openat2": 437}
X32 = 0x40000000  # that architecture's calls are numbered from here
X86_64 = 0xC000003E
ERROR, ALLOW, KILL, EPERM, ENOSYS = 0x00050000, 0x7FFF0000, 0x80000000, 1, 38
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
SET_DEATH_SIGNAL, THREAD = 1, 0x10000

# The older Landlocks know nothing of truncating, so only where a file is opened to be written, which they know.
_TRUNCATES = [(ANY_BIT, 0, "allow", os.O_TRUNC), (AND, 0, 0, os.O_ACCMODE)]
_TRUNCATES += [(EQUAL, "allow", 0, os.O_WRONLY), (EQUAL, "allow", "refuse", os.O_RDWR)]
# What an argument decides: the call, which argument, what is asked of it.
BY_ARGUMENT = (
    (56, 0, [(ANY_BIT, "allow", "refuse", THREAD)]),  # clone
    (157, 0, [(EQUAL, "refuse", "allow", SET_DEATH_SIGNAL)]),  # prctl
    # socketpair: asyncio needs streams; one of datagrams could send to any socket that has a name.
    (53, 1, [(AND, 0, 0, 0xF), (EQUAL, "allow", "refuse", socket.SOCK_STREAM)]),
    (2, 1, _TRUNCATES),  # open
    (257, 2, _TRUNCATES),  # openat
    # fcntl and ioctl: F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP have the kernel send signals,
    # FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR change metadata.
    (72, 1, [(EQUAL, "refuse", 0, command) for command in (8, 10, 15)]),
    (
        16,
        1,
        [(EQUAL, "refuse", 0, command) for command in (0x8901, 0x8902, 0x40086602, 0x401C5820)],
    ),
)

# Rights of Landlock; each of its versions brought some, and it refuses those that it does not know.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # version: how many; 16 from version 5 on
READABLE = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64")
SINGLE_FILES = dict.fromkeys(("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom"), READ_FILE)
SINGLE_FILES["/dev/null"] = READ_FILE | WRITE_FILE
END = b"\0"
"""The last byte of a program that came to its end."""


def filter_program() -> bytes:
    """The BPF program: another architecture's calls kill, x32's and the forbidden ones are refused, clone makes only
    threads."""
    ends = {"allow": ALLOW, "refuse": ERROR | EPERM, "unknown": ERROR | ENOSYS, "kill": KILL}
    steps = [
        (LOAD, 0, 0, 4),
        (EQUAL, 0, "kill", X86_64),
        (LOAD, 0, 0, 0),
        (AT_LEAST, "refuse", 0, X32),
    ]
    steps += [(EQUAL, "refuse", 0, int(call.split()[1])) for call in FORBIDDEN.split(",")]
    steps += [(EQUAL, "unknown", 0, number) for number in UNKNOWN.values()]
    for number, argument, asked in BY_ARGUMENT:
        steps += [
            (EQUAL, 0, len(asked) + 2, number),
            (LOAD, 0, 0, 16 + 8 * argument),
            *asked,
            (RETURN, 0, 0, ALLOW),
        ]
    place = {name: len(steps) + i for i, name in enumerate(ends)}
    steps += [(RETURN, 0, 0, value) for value in ends.values()]

    def jump(at: int, to: "int | str") -> int:
        return place[to] - at - 1 if isinstance(to, str) else to

    return b"".join(
        struct.pack("HBBI", op, jump(i, yes), jump(i, no), k)
        for i, (op, yes, no, k) in enumerate(steps)
    )


def _require(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what} is not to be had")
    return result


def _see_only(folder: str | None) -> None:
    """Landlock: what is not named here cannot be opened, and neither can other processes be traced or signalled."""
    create, add, restrict = 444, 445, 446
    version = _require(LIBC.syscall(create, None, 0, 1), "Landlock")
    all_rights = (1 << RIGHTS.get(version, 16)) - 1
    # The version decides how much of the struct is known; zeros after that are allowed.
    attributes = struct.pack("QQQ", all_rights, 0, 3 if version >= 6 else 0)
    ruleset = _require(LIBC.syscall(create, attributes, len(attributes), 0), "Landlock")
    rules = dict.fromkeys(READABLE, EXECUTE | READ_FILE | READ_DIR) | SINGLE_FILES
    for path, rights in (rules | ({folder: all_rights} if folder else {})).items():
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH)
            _require(
                LIBC.syscall(add, ruleset, 1, struct.pack("=Qi", rights, fd), 0),
                f"Landlock for {path}",
            )
            os.close(fd)
    _require(LIBC.syscall(restrict, ruleset, 0), "Landlock")
    os.close(ruleset)


def confine(folder: str | None, cpu_s: int, memory_mb: int = 512, file_mb: int = 16) -> None:
    """Limit this process for good. Raises OSError where this machine cannot."""
    if platform.machine() != "x86_64":
        raise OSError(
            f"the filter of system calls is for x86-64, and this machine is {platform.machine()}"
        )
    limits = {"CPU": cpu_s, "AS": memory_mb << 20, "FSIZE": file_mb << 20, "NOFILE": 64, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    program = ctypes.create_string_buffer(filter_program())
    described = struct.pack("HP", len(program) // 8, ctypes.addressof(program))
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    _require(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "dropping capabilities")
    _require(LIBC.prctl(no_new_privileges, 1, 0, 0, 0), "seccomp")
    _see_only(folder)
    _require(LIBC.prctl(set_seccomp, by_filter, described, 0, 0), "seccomp")


def _end(pid: int) -> None:
    """Kill a child and what it began. It was not waited for before, so that its id is no other's."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # killed before it had a group
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def forked() -> socket.socket:
    """Returns in every child, with its socket, to which it has said that it is there. The parent is sent a name with a
    socket for a child to begin, the name alone for it to end; all end with it, and it with its standard input."""
    control, parent, children = socket.socket(fileno=0), os.getpid(), {}
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # else nobody can be waited for, and ids change hands
    while True:
        name, fds, *_ = socket.recv_fds(control, 32, 1)
        if fds:
            children[name] = os.fork()
            if not children[name]:
                break
            os.close(fds[0])
        elif name in children:
            _end(children.pop(name))
        elif not name:
            for pid in children.values():
                _end(pid)
            sys.exit()
    _require(LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL), "a signal at the parent's death")
    if os.getppid() != parent:  # it died before
        os._exit(1)
    os.setsid()
    control.detach()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    talk = socket.socket(fileno=fds[0])
    talk.sendall(b"\n")
    return talk


def answer_calls(make: Callable[[], object], confined: bool, lines: "socket.SocketIO") -> None:
    """Call what comes, until nothing does. What goes wrong in the making is the answer to the first call."""
    made = None
    for line in lines:
        method, argument = json.loads(line)
        try:
            if made is None and confined:  # it is made under the limits that it then has
                confine(None, 60)
                os.dup2(0, 1)  # what the model's text prints is not for the log
                os.dup2(0, 2)
            made = made or make()
            answer = json.dumps(
                getattr(made, method)(argument), default=float
            )  # numbers of numpy's types
            if len(answer) >= LONGEST_LINE:
                raise ValueError(f"the observation is longer than {LONGEST_LINE >> 20} MiB")
        except Exception as e:
            failed = {
                "error": f"{type(e).__name__}: {e}"[:1000],
                "traceback": traceback.format_exc()[-10_000:],
            }
            answer = json.dumps(failed)
        lines.write(answer + "\n")
        lines.flush()


if __name__ == "__main__":
    spec, confined, *folders = sys.argv[1:] or ("", "1")
    if spec:
        sys.path += folders
        make = pkgutil.resolve_name(spec)
        for needed in getattr(make, "imports", ()):
            importlib.import_module(needed)
    own = forked()
    stream = own.makefile("rw")
    if spec:
        answer_calls(make, confined == "1", stream)
    else:
        task = json.loads(stream.readline())
        os.dup2(own.fileno(), 1)
        os.dup2(own.fileno(), 2)
        os.chdir(task["folder"])
        os.environ |= {"HOME": task["folder"], "TMPDIR": task["folder"]}
        confine(task["folder"], 10)
        # Copies keep no mode or times: changing them is refused, and a copy should not fail by that.
        shutil.copymode = shutil.copystat = lambda *_, **__: None
        exec(compile(task["code"], "<code>", "exec"), {"__name__": "__main__"})
        atexit.register(os.write, 1, END)
        atexit.register(sys.stdout.flush)  # the last is called first
