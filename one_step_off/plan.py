"""The command `python -m one_step_off.plan`; the program is `one_step_off/planner/planner.py`."""

import sys

from one_step_off.planner.planner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
