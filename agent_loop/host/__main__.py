"""The program that runs external agents for `agent_loop.host_client.AgentHosts`.

    python agent_loop/host/__main__.py '{"program": ["python", "my_agent.py"]}'
    python agent_loop/host/__main__.py '{"function": "module:function", "folders": ["/a/folder"]}'

The function is imported once. A coroutine function runs as a task of this process, a plain function
in a process that is forked for its episode, so that it can be killed.

Standard input is a socket. A message is a line of JSON:

    in   {"start": ID, "row": {...}, "base_url": URL, "api_key": KEY, "log": PATH}
         {"end": ID}
    out  {"ready": "tasks" or "processes"}, or {"failed": REASON}
         {"started": ID, "pid": PID}                                     of processes
         {"ended": ID, "exit": CODE, "value": ..., "error": ..., "traceback": ..., "log": TEXT}

All agents end with this program, and it ends with its standard input.
"""

import os
import sys
import types

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules would hide those of agents
    # The package without its __init__, which imports what this interpreter may not have.
    package = types.ModuleType("agent_loop")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["agent_loop"] = package
    from agent_loop.host.serving import main

    main()
