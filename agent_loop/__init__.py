"""Agent loops: how one prompt becomes one trajectory. Importing the package makes the loops that ship known by name."""

from agent_loop import environment, tool_loop  # noqa: F401
