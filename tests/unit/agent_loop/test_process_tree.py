"""How processes of agents are found and killed. Real agents are in test_external_failures.py."""

from __future__ import annotations

import subprocess

from agent_loop.host.process_tree import is_running, kill_all


def test_a_process_that_is_missed_once_is_killed():
    """It gets another parent in the moment in which it is looked for."""
    process = subprocess.Popen(["sleep", "60"])
    answers = iter([[], [process.pid], [process.pid]])
    try:
        kill_all(lambda: next(answers, []))
        assert process.wait(5) == -9
        assert not is_running(process.pid)
    finally:
        process.kill()
        process.wait()
