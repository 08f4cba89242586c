"""Run as a program of its own: limits itself, then runs the Python code that comes on standard input.

    python -I sandbox.py CPU_SECONDS MEMORY_MB FILE_MB < code

It cannot open sockets, leave its process group (which is killed whole) or signal and trace other processes: a seccomp
filter, which its children inherit, answers those system calls with "not permitted". Linux on x86-64 and arm64 only.
It can read, and write up to FILE_MB per file, whatever its user can: run untrusted models in a container.
"""

import ctypes
import platform
import resource
import struct
import sys

# name: (x86-64, arm64)
FORBIDDEN = {
    "socket": (41, 198),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "io_uring_setup": (425, 425),  # can do the work of the others
}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
NOT_PERMITTED, ALLOW, KILL = 0x00050001, 0x7FFF0000, 0x80000000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def filter_program(machine: str) -> bytes:
    """The BPF program: another architecture's calls kill, x32's and the forbidden ones are refused. Raises KeyError."""
    column, audit = ARCHITECTURES[machine]
    numbers = [both[column] for both in FORBIDDEN.values()]
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    steps.append((0x35, len(numbers) + 1, 0, 0x40000000))  # x32 numbers its calls from there
    steps += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(0x06, 0, 0, ALLOW), (0x06, 0, 0, NOT_PERMITTED)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def confine(cpu_s: int, memory_mb: int, file_mb: int) -> None:
    """Limit this process and its children for good. Raises OSError or KeyError where this machine cannot."""
    for what, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    libc, program = ctypes.CDLL(None, use_errno=True), filter_program(platform.machine())
    filled = _Program(len(program) // 8, program)
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, by_filter, ctypes.byref(filled), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp is not to be had")


if __name__ == "__main__":
    source = sys.stdin.read()
    confine(*map(int, sys.argv[1:4]))
    exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})
