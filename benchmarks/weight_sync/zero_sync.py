"""A run whose weight syncs cost nothing: after the first one only the replicas' version stamp
moves.

Its engines keep old weights, so it is for timing alone. `exposed` starts it:

    python -m benchmarks.weight_sync.zero_sync config=FILE [section.key=value ...]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.weight_sync.replica import BenchmarkReplica
from one_step_off import main_ppo
from one_step_off.cluster.remote_calls import call_all
from one_step_off.data.samples import PolicyVersion
from one_step_off.runtime import persistent_actors, processes
from one_step_off.weight_sync.coordinator import WeightSync


class ZeroSync(WeightSync):
    """The first sync is real, because the engines' weights have not been checked before it."""

    first_metrics: dict[str, Any] = {}

    def score_canary(self) -> Any:
        """Nothing after the first sync: the trainer's half of the canary would take time too."""
        return None if self.first_metrics else super().score_canary()

    async def __call__(self, stamp: PolicyVersion, expected: Any = None) -> dict[str, Any]:
        """As WeightSync's, with the metrics of the first sync but for the times."""
        if not self.first_metrics:
            self.first_metrics = await super().__call__(stamp, expected)
            return self.first_metrics
        begin = time.perf_counter()
        await call_all(self.cfg.timeout_s, "stamp", self.rollout.replicas, "restamp", stamp)
        seconds = time.perf_counter() - begin
        return self.first_metrics | {
            "time/sync_s": seconds,
            "sync/transfer_s": seconds,
            "time/canary_s": 0.0,
        }


def main() -> int:
    """Run the program with this sync. Returns the exit code."""
    processes.WeightSync = ZeroSync
    persistent_actors.RolloutReplica = BenchmarkReplica
    return main_ppo.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
