"""`timeline.json`: which process worked when, as a Chrome trace (chrome://tracing, Perfetto).

Each line is one event. The closing bracket of the list is left out, as the format allows, so the
file is always valid."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from one_step_off.cluster.run_events import Span

# The lanes of the pipeline as a whole, in the order in which they are shown.
PIPELINE_LANES = (
    "rollout",
    "evaluation",
    "sync",
    "actor",
    "critic",
    "ref",
    "reward_model",
    "teacher",
    "checkpoint",
    "checkpoint write",
)
PIPELINE_PID = 1
FIRST_ROLLOUT_PID = 10_000
FIRST_TRAINER_PID = 20_000
TIDS_PER_PROCESS = 100
PROCESS_LANE = re.compile(r"(rollout|trainer) (\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class LaneIds:
    """Where the trace shows a lane: the name and pid of its process, and its tid. The viewer sorts
    by these numbers."""

    process: str
    pid: int
    tid: int


def lane_ids(lane: str) -> LaneIds:
    """The ids of a lane, the same in each attempt of a run. "sync rollout 0.1 wire" belongs to
    worker 1 of replica 0."""
    match = PROCESS_LANE.search(lane)
    if match is None:
        is_known = lane in PIPELINE_LANES
        position = PIPELINE_LANES.index(lane) if is_known else len(PIPELINE_LANES)
        return LaneIds("pipeline", PIPELINE_PID, 1 + position)
    kind, index, worker = match.groups()
    first_pid = FIRST_TRAINER_PID if kind == "trainer" else FIRST_ROLLOUT_PID
    pid = first_pid + int(index)
    # Two lanes per worker, after the two of the process itself.
    offset = 2 * int(worker or 0)
    if lane.startswith("sync"):
        offset += 2
    if lane.endswith(("evaluation", "wire")):
        offset += 1
    return LaneIds(f"{kind} {index}", pid, TIDS_PER_PROCESS * pid + offset)


class Timeline:
    """Appends spans to `timeline.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.named_lanes: dict[str, LaneIds] = {}  # lanes whose names this process has written

    def write(self, spans: Iterable[Span]) -> None:
        """Append these spans."""
        events = []
        for lane, activity, step, begin, end in spans:
            if lane not in self.named_lanes:
                self.named_lanes[lane] = lane_ids(lane)
                events += _naming_events(lane, self.named_lanes[lane])
            ids = self.named_lanes[lane]
            events.append(
                {
                    "name": f"{activity} {step}",
                    "cat": lane,
                    "ph": "X",
                    "ts": round(begin * 1e6),
                    "dur": round((end - begin) * 1e6),
                    "args": {"step": step},
                    "pid": ids.pid,
                    "tid": ids.tid,
                }
            )
        if not events:
            return
        # One call for all events, since each call costs more than its event; then each event gets a
        # line of its own.
        lines = json.dumps(events)[1:-1].replace("}, {", "},\n{") + ",\n"
        with open(self.path, "a") as file:
            is_new = file.tell() == 0
            file.write("[\n" + lines if is_new else lines)


def _naming_events(lane: str, ids: LaneIds) -> list[dict[str, Any]]:
    """The metadata events that name and sort a lane and its process."""
    arguments = {
        "process_name": {"name": ids.process},
        "process_sort_index": {"sort_index": ids.pid},
        "thread_name": {"name": lane},
        "thread_sort_index": {"sort_index": ids.tid},
    }
    return [
        {"name": name, "ph": "M", "args": args, "pid": ids.pid, "tid": ids.tid}
        for name, args in arguments.items()
    ]
