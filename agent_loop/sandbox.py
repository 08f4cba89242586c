"""A program that forks a process for every socket that it receives, and confines it.

`processes.ForkServer` starts it:

    python -I sandbox.py [SPEC CONFINED FOLDER...]

Without arguments a process runs the Python code that comes through its socket as
{"code": ..., "folder": ...}, and writes there what it printed. With SPEC (`module:Class`, searched
for in FOLDERs too) a process makes one object of that class and answers calls, a line of JSON each:
["method", argument] in, the answer or {"error": ..., "traceback": ...} out.

A confined process (with SPEC: if CONFINED is 1)

- cannot open sockets, start processes, or reach other processes: a seccomp filter answers "not
  permitted";
- has no capabilities;
- opens only the files of the interpreter, of the system's libraries and of its folder, and writes
  only in its folder (Landlock);
- changes no metadata of files (the filter).

Linux 5.13 on x86-64 only.
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
MAX_LINE = 1 << 20
MAX_MEMORY_MIB = 512  # of address space
MAX_FILE_MIB = 16
"""Bytes of a call's answer."""

# Names and numbers of the system calls that are refused: network, other processes, what outlives
# this process (shared memory, queues, keys), memory that its limit does not count, io_uring, which
# can do the work of the others, and changes of a file by its name or of its metadata, which not
# every version of Landlock covers.
FORBIDDEN = """
    socket 41, connect 42, bind 49, fork 57, vfork 58, setsid 112, kill 62, tkill 200, tgkill 234,
    rt_sigqueueinfo 129, rt_tgsigqueueinfo 297, pidfd_send_signal 424, pidfd_open 434,
    pidfd_getfd 438, ptrace 101, process_vm_readv 310, process_vm_writev 311,
    process_madvise 440, migrate_pages 256, move_pages 279, prlimit64 302, setpriority 141,
    ioprio_set 251, sched_setparam 142, sched_setscheduler 144, sched_setaffinity 203,
    sched_setattr 314, shmget 29, shmat 30, shmctl 31, semget 64, semop 65, semctl 66,
    semtimedop 220, msgget 68, msgsnd 69, msgrcv 70, msgctl 71, mq_open 240, memfd_create 319,
    memfd_secret 447, add_key 248, request_key 249, keyctl 250, unshare 272, setns 308,
    bpf 321, userfaultfd 323, perf_event_open 298, io_uring_setup 425, truncate 76, chmod 90,
    fchmod 91, fchmodat 268, fchmodat2 452, chown 92, fchown 93, lchown 94, fchownat 260,
    utime 132, utimes 235, futimesat 261, utimensat 280, setxattr 188, lsetxattr 189,
    fsetxattr 190, removexattr 197, lremovexattr 198, fremovexattr 199, setxattrat 463,
    removexattrat 466, file_setattr 469
"""
# Their arguments are structs, which a filter cannot read. The answer is "no such call": libc then
# uses clone and openat.
NOT_IMPLEMENTED = {"clone3": 435, "openat2": 437}

X86_64 = 0xC000003E  # the architecture of the filter
X32 = 0x40000000  # that architecture's calls are numbered from here

# Results of a filter.
ERROR = 0x00050000
ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 1
ENOSYS = 38

# Instructions of a filter.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
AND = 0x54
RETURN = 0x06

SET_DEATH_SIGNAL = 1  # of prctl
THREAD = 0x10000  # of clone

# Old versions of Landlock do not know truncation, so O_TRUNC is allowed only where a file is opened
# for writing, which all versions know.
_TRUNCATES = [(ANY_BIT, 0, "allow", os.O_TRUNC), (AND, 0, 0, os.O_ACCMODE)]
_TRUNCATES += [(EQUAL, "allow", 0, os.O_WRONLY), (EQUAL, "allow", "refuse", os.O_RDWR)]
# Calls that an argument decides: number of the call, which argument, instructions for it.
BY_ARGUMENT = (
    (56, 0, [(ANY_BIT, "allow", "refuse", THREAD)]),  # clone
    (157, 0, [(EQUAL, "refuse", "allow", SET_DEATH_SIGNAL)]),  # prctl
    # socketpair: asyncio needs streams; a datagram socket could send to any socket that has a name.
    (53, 1, [(AND, 0, 0, 0xF), (EQUAL, "allow", "refuse", socket.SOCK_STREAM)]),
    (2, 1, _TRUNCATES),  # open
    (257, 2, _TRUNCATES),  # openat
    # fcntl and ioctl: F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP make the kernel send
    # signals, FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR change metadata.
    (72, 1, [(EQUAL, "refuse", 0, command) for command in (8, 10, 15)]),
    (
        16,
        1,
        [(EQUAL, "refuse", 0, command) for command in (0x8901, 0x8902, 0x40086602, 0x401C5820)],
    ),
)

# Rights of Landlock. Each of its versions added some, and it refuses those that it does not know.
EXECUTE = 1
WRITE_FILE = 2
READ_FILE = 4
READ_DIR = 8
RIGHT_COUNTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version
NEWEST_RIGHT_COUNT = 16  # from version 5 on
READABLE = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64")
SINGLE_FILES = dict.fromkeys(("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom"), READ_FILE)
SINGLE_FILES["/dev/null"] = READ_FILE | WRITE_FILE
END = b"\0"
"""The last byte of a program that came to its end."""


def filter_program() -> bytes:
    """The seccomp filter as a BPF program.

    It kills a process that calls by another architecture's numbers, refuses the calls of x32 and
    the forbidden ones, and lets clone make only threads.
    """
    results = {"allow": ALLOW, "refuse": ERROR | EPERM, "unknown": ERROR | ENOSYS, "kill": KILL}
    # Instruction, jump if true, jump if false, operand. A jump is a number of instructions or a
    # result.
    steps = [
        (LOAD, 0, 0, 4),
        (EQUAL, 0, "kill", X86_64),
        (LOAD, 0, 0, 0),
        (AT_LEAST, "refuse", 0, X32),
    ]
    for call in FORBIDDEN.split(","):
        number = int(call.split()[1])
        steps.append((EQUAL, "refuse", 0, number))
    for number in NOT_IMPLEMENTED.values():
        steps.append((EQUAL, "unknown", 0, number))
    for number, argument, instructions in BY_ARGUMENT:
        steps.append((EQUAL, 0, len(instructions) + 2, number))
        steps.append((LOAD, 0, 0, 16 + 8 * argument))
        steps += instructions
        steps.append((RETURN, 0, 0, ALLOW))
    position = {name: len(steps) + i for i, name in enumerate(results)}
    steps += [(RETURN, 0, 0, value) for value in results.values()]

    def distance(index: int, target: "int | str") -> int:
        return position[target] - index - 1 if isinstance(target, str) else target

    program = b""
    for i, (instruction, if_true, if_false, operand) in enumerate(steps):
        jumps = distance(i, if_true), distance(i, if_false)
        program += struct.pack("HBBI", instruction, *jumps, operand)
    return program


def _require(result: int, what: str) -> int:
    """The result of a system call. Raises OSError: it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what} is not available")
    return result


def _restrict_files(folder: "str | None") -> None:
    """By Landlock: nothing can be opened that is not named here, and other processes can be neither
    traced nor signaled."""
    create_ruleset = 444
    add_rule = 445
    restrict_self = 446
    version = _require(LIBC.syscall(create_ruleset, None, 0, 1), "Landlock")
    all_rights = (1 << RIGHT_COUNTS.get(version, NEWEST_RIGHT_COUNT)) - 1
    # The version decides how much of the struct is known; zeros after that are allowed.
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", all_rights, 0, scopes)
    ruleset = LIBC.syscall(create_ruleset, attributes, len(attributes), 0)
    _require(ruleset, "Landlock")
    rules = dict.fromkeys(READABLE, EXECUTE | READ_FILE | READ_DIR) | SINGLE_FILES
    if folder:
        rules[folder] = all_rights
    for path, rights in rules.items():
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", rights, fd)
            _require(LIBC.syscall(add_rule, ruleset, 1, rule, 0), f"Landlock for {path}")
            os.close(fd)
    _require(LIBC.syscall(restrict_self, ruleset, 0), "Landlock")
    os.close(ruleset)


def confine(folder: "str | None", cpu_s: int) -> None:
    """Limit this process for good.

    Args:
        folder: in which it may write.
        cpu_s: seconds of CPU time.

    Raises:
        OSError: this machine cannot do it.
    """
    if platform.machine() != "x86_64":
        raise OSError(
            f"the filter of system calls is for x86-64, and this machine is {platform.machine()}"
        )
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: MAX_MEMORY_MIB << 20,
        resource.RLIMIT_FSIZE: MAX_FILE_MIB << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))
    program = ctypes.create_string_buffer(filter_program())
    described = struct.pack("HP", len(program) // 8, ctypes.addressof(program))
    no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _require(LIBC.capset(*no_capabilities), "dropping capabilities")
    set_no_new_privileges = 38
    _require(LIBC.prctl(set_no_new_privileges, 1, 0, 0, 0), "seccomp")
    _restrict_files(folder)
    set_seccomp = 22
    mode_filter = 2
    _require(LIBC.prctl(set_seccomp, mode_filter, described, 0, 0), "seccomp")


def _end(pid: int) -> None:
    """Kill a child and the processes that it started. Nothing has waited for the child before, so
    its id is no other process's."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # killed before it had a group
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def serve_forks() -> socket.socket:
    """Fork children on request. Returns in every child, with its socket, on which it has greeted.

    The server's standard input is a socket. A message is the name of a child: with a socket the
    child begins, without one it ends. The server ends with its standard input, and all children end
    with it.
    """
    control = socket.socket(fileno=0)
    server_pid = os.getpid()
    children: dict[bytes, int] = {}
    # Else children could not be waited for, and their ids might be reused.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        name, fds, *_ = socket.recv_fds(control, 32, 1)
        if fds:
            pid = os.fork()
            if pid == 0:
                return _greet(control, server_pid, fds[0])
            children[name] = pid
            os.close(fds[0])
        elif name in children:
            _end(children.pop(name))
        elif not name:
            for pid in children.values():
                _end(pid)
            sys.exit()


def _greet(control: socket.socket, server_pid: int, fd: int) -> socket.socket:
    """In a new child: detach from the server, and greet on the socket `fd`."""
    _require(LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGKILL), "a signal at the parent's death")
    if os.getppid() != server_pid:  # the server died before
        os._exit(1)
    os.setsid()
    control.detach()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    connection = socket.socket(fileno=fd)
    connection.sendall(b"\n")
    return connection


def answer_calls(make: Callable[[], object], confined: bool, lines: "socket.SocketIO") -> None:
    """Answer calls until no more come.

    Args:
        make: makes the object whose methods are called. An exception in it is the answer to the
            first call.
        lines: calls in, answers out.
    """
    served = None
    for line in lines:
        method, argument = json.loads(line)
        try:
            if served is None and confined:
                _confine_silently()  # the object is made under its limits
            served = served or make()
            value = getattr(served, method)(argument)
            answer = json.dumps(value, default=float)  # float: numbers of numpy's types
            if len(answer) >= MAX_LINE:
                raise ValueError(f"the observation is longer than {MAX_LINE >> 20} MiB")
        except Exception as e:
            failure = {
                "error": f"{type(e).__name__}: {e}"[:1000],
                "traceback": traceback.format_exc()[-10_000:],
            }
            answer = json.dumps(failure)
        lines.write(answer + "\n")
        lines.flush()


def _confine_silently() -> None:
    """Confine this process; what the model's text prints does not reach the log."""
    confine(None, cpu_s=60)
    os.dup2(0, 1)
    os.dup2(0, 2)


def confine_program(connection: socket.socket, folder: str) -> None:
    """Confine this process to a folder, with its output on the connection."""
    os.dup2(connection.fileno(), 1)
    os.dup2(connection.fileno(), 2)
    os.chdir(folder)
    os.environ["HOME"] = folder
    os.environ["TMPDIR"] = folder
    confine(folder, cpu_s=10)
    # Copies keep no mode or times: changing them is refused, and a copy should not fail by that.
    shutil.copymode = shutil.copystat = lambda *_, **__: None


def serve_object(spec: str, confined: bool, folders: "list[str]") -> None:
    """Fork, and answer calls in every child."""
    sys.path += folders
    make = pkgutil.resolve_name(spec)
    for module in getattr(make, "imports", ()):
        importlib.import_module(module)
    connection = serve_forks()
    answer_calls(make, confined, connection.makefile("rw"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_object(sys.argv[1], sys.argv[2] == "1", sys.argv[3:])
    else:
        connection = serve_forks()
        task = json.loads(connection.makefile("rw").readline())
        confine_program(connection, task["folder"])
        # Here and not in a function, so that a traceback has only one frame that is not the
        # program's.
        exec(compile(task["code"], "<code>", "exec"), {"__name__": "__main__"})
        # Registered last, called first: the output is flushed before END.
        atexit.register(os.write, 1, END)
        atexit.register(sys.stdout.flush)
