"""Consoles that fail: a run goes on whatever its stdout and stderr do, and a command whose product
is its output ends as its reader does. All in processes of their own, with real terminals, pipes
and devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import selectors
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from one_step_off.config import console_streams

ROOT = Path(__file__).parents[3]
TINY = f"config={ROOT}/config/gsm8k_tiny_cpu.yaml"
STEPS = 30
EXIT_CODE = 7
RUN = f"""
    import logging, sys, time, warnings
    from pathlib import Path

    from one_step_off.config import console_streams
    from one_step_off.config.command_line import exit_code
    from one_step_off.monitoring.console import RunConsole
    from one_step_off.monitoring.loggers import Loggers
    from tests.unit.monitoring.test_console import row

    console_streams.STALL_S = console_streams.CLOSE_TIMEOUT_S = 0.2
    folder = Path(sys.argv[1])

    def run(argv):
        with RunConsole(log_file=folder / "logs" / "console.log") as console:
            loggers = Loggers(console.print_line)
            console.table([("model", "größe 正确")])
            with console.training({STEPS}):
                for step in range({STEPS}):
                    # A part of the reward, as a user names it.
                    console.step(row(step) | {{"reward/正确/mean": 0.5}}, {STEPS})
                    print("from a library \\udc80", "x" * 200, flush=True)
                    print("to stderr", file=sys.stderr)
                    warnings.warn(f"of step {{step}}")
                    logging.getLogger("library").warning("of step %s", step)
                    loggers.add("a logger", lambda: 1 / 0)
                    (folder / "steps").write_text(str(step + 1))
                    time.sleep(0.02)  # longer together than a console may stall
            loggers.close()
        return {EXIT_CODE}

    def command(argv):
        console_streams.never_wait()
        print("warning: before the run", file=sys.stderr)
        code = run(argv)
        print("error: the run ended by a test", file=sys.stderr)
        return code

    if "api" in sys.argv:  # as `one_step_off.train`
        sys.exit(run(sys.argv))
    sys.exit(exit_code(command, sys.argv))
"""


def started(
    code: str, folder: Path, *argv: str, env: dict[str, str] | None = None, **streams: object
) -> subprocess.Popen:
    """A program in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(folder), *argv],
        cwd=ROOT,
        env=environment | {"TERM": "dumb", "PYTHONPATH": str(ROOT)} | (env or {}),
        **streams,
    )


def steps_of(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "steps").read_text())
    return 0


def wait_for_steps(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 60
    while steps_of(folder) < steps:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_went_on(process: subprocess.Popen, folder: Path) -> None:
    """The run made all its steps, without a wait for its console, and ended with its own code."""
    assert process.wait(60) == EXIT_CODE
    assert steps_of(folder) == STEPS


def log_of(folder: Path) -> str:
    return (folder / "logs" / "console.log").read_text()


@pytest.mark.parametrize("mode", ["command", "api"])
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_that_is_closed(term: str, mode: str, tmp_path: Path) -> None:
    terminal, slave = pty.openpty()
    process = started(
        RUN,
        tmp_path,
        mode,
        env={"TERM": term},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    while steps_of(tmp_path) < 3:
        os.read(terminal, 65536)
    os.close(terminal)
    assert_went_on(process, tmp_path)
    log = log_of(tmp_path)
    for stream in ("stdout", "stderr"):
        assert log.count(f"{stream}: Input/output error; what it does not take") == 1
    assert f"step {STEPS}/{STEPS}" in log
    assert "\x1b" not in log
    assert "━" not in log, "lines, and not the bar"


@pytest.mark.parametrize("mode", ["command", "api"])
def test_a_pipe_whose_reader_ends(mode: str, tmp_path: Path) -> None:
    with open(tmp_path / "errors", "w") as errors:
        process = started(RUN, tmp_path, mode, stdout=subprocess.PIPE, stderr=errors)
    wait_for_steps(tmp_path, 3)
    process.stdout.close()
    assert_went_on(process, tmp_path)
    log = log_of(tmp_path)
    assert log.startswith("stdout: Broken pipe; what it does not take is written here\n")
    assert f"step {STEPS}/{STEPS}" in log
    assert "正确" in log
    lines = (tmp_path / "errors").read_text().splitlines()
    assert f"warning: stdout: Broken pipe; its lines go to {tmp_path}/logs/console.log" in lines
    assert lines[-1] == "error: the run ended by a test" or mode == "api"


@pytest.mark.parametrize("mode", ["command", "api"])
def test_a_full_disk_below_both(mode: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = started(RUN, tmp_path, mode, stdout=full, stderr=full)
    assert_went_on(process, tmp_path)
    log = log_of(tmp_path)
    assert "stdout: No space left on device; " in log
    assert f"step 1/{STEPS}".replace("1/", " 1/") in log, "also what came first"


@pytest.mark.parametrize("mode", ["command", "api"])
def test_neither_stream_is_open(mode: str, tmp_path: Path) -> None:
    """Else the next file that is opened would receive what libraries print."""
    process = started(
        f"import os\nfor i in (0, 1, 2): os.close(i)\n{textwrap.dedent(RUN)}", tmp_path, mode
    )
    assert_went_on(process, tmp_path)
    shell = f'exec "$0" -c "$1" {tmp_path}/closed {mode} <&- >&- 2>&-'
    (tmp_path / "closed").mkdir()
    command = ["bash", "-c", shell, sys.executable, textwrap.dedent(RUN)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == EXIT_CODE
    assert (tmp_path / "closed" / "steps").read_text() == str(STEPS)


def test_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    process = started(RUN, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    begin = time.monotonic()
    assert_went_on(process, tmp_path)
    assert time.monotonic() - begin < 30
    assert "its reader does not read it; what it does not take is written here" in log_of(tmp_path)
    process.stdout.close()


def test_a_terminal_that_is_stopped_by_ctrl_s(tmp_path: Path) -> None:
    terminal, slave = pty.openpty()
    process = started(RUN, tmp_path, env={"TERM": "xterm"}, stdout=slave, stderr=slave)
    os.close(slave)
    os.read(terminal, 1)
    os.write(terminal, b"\x13")
    assert_went_on(process, tmp_path)
    assert "its reader does not read it" in log_of(tmp_path)
    os.close(terminal)


def test_a_terminal_that_another_program_has_made_non_blocking(tmp_path: Path) -> None:
    """Python's own streams lose text there, or raise BlockingIOError."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = started(RUN, tmp_path, stdout=writer, stderr=writer)
    os.close(writer)
    with open(reader, "rb") as file:
        out = file.read().decode()
    assert_went_on(process, tmp_path)
    assert out.count("from a library") == STEPS
    assert out.endswith("error: the run ended by a test\n")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("latin-1", "größe ??"),
        ("ascii", "gr??e ??"),
        ("ascii:backslashreplace", "gr\\xf6\\xdfe \\u6b63\\u786e"),
        ("utf-8", "größe 正确"),
    ],
)
def test_an_encoding_without_the_characters(encoding: str, shown: str, tmp_path: Path) -> None:
    process = started(
        RUN,
        tmp_path,
        env={"PYTHONIOENCODING": encoding},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out = process.communicate(timeout=60)[0].decode("latin-1" if encoding == "latin-1" else "utf-8")
    assert_went_on(process, tmp_path)
    assert f"model        {shown}\n" in out
    assert out.count("from a library ") == STEPS
    assert out.endswith("error: the run ended by a test\n")
    assert not (tmp_path / "logs").exists(), "a console that takes everything needs no log"


@pytest.mark.parametrize("ending", ["closed", "unread"])
def test_what_a_library_prints_at_the_end_of_the_process_changes_nothing(
    ending: str, tmp_path: Path
) -> None:
    """As in an atexit handler. Python's own flush at the end would make the exit code 120, and a
    print to a pipe that nobody reads would wait for ever."""
    code = """
        import atexit, sys
        from one_step_off.config import console_streams
        from one_step_off.config.command_line import exit_code

        console_streams.STALL_S = console_streams.CLOSE_TIMEOUT_S = 0.5
        atexit.register(lambda: print("x" * 100_000))

        def command(argv):
            console_streams.never_wait()
            print("y" * 100_000)
            open(sys.argv[1] + "/done", "w").close()
            return 0

        sys.exit(exit_code(command, sys.argv))
    """
    reader, writer = os.pipe()
    if ending == "closed":
        os.close(reader)
    process = started(code, tmp_path, stdout=writer)
    os.close(writer)
    assert process.wait(60) == 0
    assert (tmp_path / "done").exists()


def test_files_of_a_run_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    code = r"""
        import sys
        from one_step_off.config.loading import load_config
        from one_step_off.runtime.failure_report import report_failure
        from one_step_off.runtime.run_folder import write_config_and_versions

        cfg = load_config([f"trainer.output_dir={sys.argv[1]}"])
        cfg.data.instruction = "\u8bf7"
        write_config_and_versions(cfg, {}, "cpu")
        report_failure(cfg, ValueError("\u8bf7 \udc80"))
    """
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert started(code, tmp_path, env=locale).wait(60) == 0
    for name in ("config.yaml", "error.log"):
        assert "请" in (tmp_path / name).read_text(encoding="utf-8")


def test_a_stream_that_is_read_does_not_wait_for_one_that_is_not(tmp_path: Path) -> None:
    with open(tmp_path / "errors", "w") as errors:
        process = started(RUN, tmp_path, stdout=subprocess.PIPE, stderr=errors)
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    assert_went_on(process, tmp_path)
    process.stdout.close()
    assert (tmp_path / "errors").read_text().endswith("\nerror: the run ended by a test\n")


def test_streams_keep_their_order_and_lose_nothing(tmp_path: Path) -> None:
    """The reader is slow, and gets more at once than a pipe holds."""
    code = """
        import sys
        from one_step_off.config.command_line import exit_code
        from one_step_off.config.console_streams import never_wait

        def command(argv):
            never_wait()
            for number in range(20_000):
                print(number, file=sys.stderr if number % 3 else sys.stdout)
            return 0

        sys.exit(exit_code(command, sys.argv))
    """
    process = started(code, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    time.sleep(1.0)
    out, _ = process.communicate(timeout=60)
    assert [int(line) for line in out.split()] == list(range(20_000))
    assert process.returncode == 0


def test_a_forked_process_prints_too(tmp_path: Path) -> None:
    """As one of multiprocessing in a user's function; it has no thread that writes for it."""
    code = """
        import os, sys
        from one_step_off.config.command_line import exit_code
        from one_step_off.config.console_streams import never_wait

        def command(argv):
            never_wait()
            child = os.fork()
            if child == 0:
                print("of the child")
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        sys.exit(exit_code(command, sys.argv))
    """
    process = started(code, tmp_path, stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b"of the child\n"
    assert process.returncode == 0


# --- commands whose product is their output -------------------------------------------------------


def write_samples(folder: Path) -> None:
    (folder / "samples").mkdir()
    row = '{"response": "正确 \\ud83d", "length": 3, "reward": 1.0, "prompt": "größe"}\n'
    (folder / "samples" / "step_000000.jsonl").write_text(row * 3000)


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "help": lambda folder: ["one_step_off.main_ppo", "--help"],
    "dry run": lambda folder: [
        "one_step_off.main_ppo",
        TINY,
        "data.instruction=请用数字回答",
        "--dry-run",
    ],
    "view": lambda folder: ["one_step_off.view", str(folder), "--best", "3000"],
    "plan": lambda folder: ["one_step_off.plan", "--times", "1,2,0.1", TINY],
    "checks": lambda folder: ["one_step_off.gpu_check", "--list"],
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    write_samples(tmp_path)
    return [sys.executable, "-m", *COMMANDS[request.param](tmp_path)]


def test_output_ends_quietly_with_its_reader(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 0


def test_output_to_a_full_disk_is_an_error_that_names_stdout(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.stderr == "error: stdout: No space left on device\n"
    assert done.returncode == 1


def test_output_shows_what_its_encoding_has(command: list[str]) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert len(done.stdout) > 100


def test_output_waits_for_its_reader(tmp_path: Path) -> None:
    """As `view | less`: all of it arrives, however slowly it is read."""
    write_samples(tmp_path)
    argv = [sys.executable, "-m", *COMMANDS["view"](tmp_path)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
    with selectors.DefaultSelector() as selector:  # `select` takes no descriptor above 1023
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.select(60)
    time.sleep(0.3)
    assert process.poll() is None, "more than a pipe holds"
    assert process.communicate(timeout=60)[0].count(b"--- best ") == 3000
    assert process.returncode == 0


def test_bad_input_is_exit_code_2_where_stderr_cannot_be_written(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "one_step_off.main_ppo", "config=nowhere.yaml"]
        assert subprocess.run(command, cwd=ROOT, stderr=full, timeout=60).returncode == 2
        command = [sys.executable, "-m", "one_step_off.view", str(tmp_path)]
        assert subprocess.run(command, cwd=ROOT, stderr=full, timeout=60).returncode == 2


def test_what_a_users_function_prints_to_a_full_disk_is_dropped(tmp_path: Path) -> None:
    """In the processes of a run, whose output goes to files of the run folder."""
    code = """
        import sys
        from one_step_off.config.console_streams import never_fail
        from one_step_off.config.user_code import log_traceback, redirect_output

        redirect_output("/dev/full")
        never_fail()
        print("from a reward function", flush=True)
        log_traceback("a failure", "Traceback ...")
        open(sys.argv[1] + "/done", "w").close()
    """
    started(code, tmp_path).wait(60)
    assert (tmp_path / "done").exists()


def test_a_busy_process_is_not_taken_for_a_console_that_nobody_reads() -> None:
    """A call in C that keeps the lock of the interpreter keeps the writing thread waiting."""
    reader, writer = os.pipe()
    with open(writer, "w") as file:
        console = console_streams.ConsoleWriter([console_streams.ConsoleStream("stdout", file)])
        console.waiting_since = time.monotonic() - 60  # an ended write that could not say so
        assert not console.is_stalled
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        assert console.is_stalled
        os.read(reader, 8192)
        assert not console.is_stalled
        console.close()
    os.close(reader)
