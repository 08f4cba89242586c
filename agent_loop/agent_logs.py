"""The logs of external agents: a file per episode in RUN/agents, of those that printed something.

NAME.open.log     of an agent that runs
NAME.log          of one that has ended
NAME.failed.log   of one that has failed, or was killed
"""

import contextlib
import itertools
import os
from pathlib import Path

from one_step_off.config.user_code import AGENT_LOG_FOLDER

KEPT = {".open.log": 2048, ".failed.log": 500, ".log": 500}
"""How many logs of each kind are kept, the newest ones."""
PRUNE_EVERY = 64  # ended episodes


class AgentLogs:
    """The folder of one run, which several replicas may share."""

    def __init__(self, output_dir: str) -> None:
        self.folder = Path(os.path.abspath(output_dir)) / AGENT_LOG_FOLDER
        self.ended = itertools.count(1)

    def open(self, name: str) -> str:
        """Where the agent of episode `name` writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return str(self.folder / f"{name}.open.log")

    def end(self, name: str, failed: bool) -> str:
        """Give the log of an agent that has ended its name.

        Returns:
            The log, relative to the run's folder; "": it printed nothing.
        """
        suffix = ".failed.log" if failed else ".log"
        ended = self.folder / f"{name}{suffix}"
        if next(self.ended) % PRUNE_EVERY == 0:
            self.prune()
        try:
            (self.folder / f"{name}.open.log").rename(ended)
        except OSError:
            return ""
        return f"{AGENT_LOG_FOLDER}/{ended.name}"

    def prune(self) -> None:
        """Remove the oldest logs beyond the number that is kept."""
        logs: dict[str, list[tuple[float, str]]] = {suffix: [] for suffix in KEPT}
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                suffix = next((suffix for suffix in KEPT if entry.name.endswith(suffix)), "")
                if suffix:
                    with contextlib.suppress(OSError):  # another replica removed it
                        logs[suffix].append((entry.stat().st_mtime, entry.path))
        for suffix, found in logs.items():
            for _, path in sorted(found, reverse=True)[KEPT[suffix] :]:
                with contextlib.suppress(OSError):
                    os.unlink(path)
