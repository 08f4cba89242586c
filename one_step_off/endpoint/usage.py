"""Whether a run has an endpoint. It imports nothing of what serves one, which is slow to import."""

from collections.abc import Iterable

from agent_loop.base import LOOPS
from one_step_off.config.schema import Config


def uses_endpoint(cfg: Config, loop_names: Iterable[str]) -> bool:
    """Whether a run has an endpoint: by `agent.endpoint`, or because of one of its loops."""
    if cfg.agent.endpoint:
        return True
    loops = [LOOPS.find(name or cfg.agent.loop).function for name in loop_names]
    return any(getattr(loop, "needs_endpoint", False) for loop in loops)
