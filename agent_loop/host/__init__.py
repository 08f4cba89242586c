"""A program that runs external agents, one per episode: as tasks of its own, or as processes.

It imports nothing but Python's standard library and this package, because another interpreter than
that of the run may run it. Read `__main__` first; `agent_loop.host_client` starts it.
"""
