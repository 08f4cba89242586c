"""A run whose weight syncs cost nothing: after the first one only the replicas' stamp moves. Its engines keep old weights,
so it is for timing alone (benchmarks/sync_exposed.py).

    python -m benchmarks.weight_sync.zero_sync config=FILE [section.key=value ...]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.weight_sync.replica import BenchReplica
from one_step_off import main_ppo
from one_step_off.cluster.remote_calls import call_all
from one_step_off.data.samples import Stamp
from one_step_off.runtime import processes as roles
from one_step_off.weight_sync.coordinator import WeightSync


class ZeroSync(WeightSync):
    """The first sync is real, for the engines hold no weights that were checked before it."""

    first: dict[str, Any] = {}

    def score_canary(self) -> Any:
        """The trainer scores nothing either."""
        return None if self.first else super().score_canary()

    async def __call__(self, stamp: Stamp, expected: Any = None) -> dict[str, Any]:
        """As WeightSync's, with the first sync's figures but for the times."""
        if not self.first:
            self.first = await super().__call__(stamp, expected)
            return self.first
        begin = time.perf_counter()
        await call_all(self.cfg.timeout_s, "stamp", self.rollout.replicas, "restamp", stamp)
        seconds = time.perf_counter() - begin
        return self.first | {
            "time/sync_s": seconds,
            "sync/transfer_s": seconds,
            "time/canary_s": 0.0,
        }


if __name__ == "__main__":
    roles.WeightSync, roles.RolloutReplica = ZeroSync, BenchReplica
    sys.exit(main_ppo.main(sys.argv[1:]))
