"""The command `python -m one_step_off.report`; the program is `one_step_off/monitoring/report.py`."""

import sys

from one_step_off.monitoring.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
