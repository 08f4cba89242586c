"""Agent loops: how one prompt becomes one trajectory.

Read `base.AgentLoop` and `trajectory.Trajectory` first, then `answer_loops.SingleTurn`, the
smallest loop. Importing the package registers its own loops.
"""

from agent_loop import (  # noqa: F401
    answer_loops,
    environment,
    external,
    tool_loop,
)
