"""Agent loops: how one prompt becomes one trajectory.

Read `base.AgentLoop` and `trajectory.Trajectory` first, then `single_turn`, the smallest loop.
Importing the package registers its own loops.
"""

from agent_loop import (  # noqa: F401
    environment,
    external,
    retry_with_feedback,
    single_turn,
    tool_loop,
)
