"""One command that checks a machine: shell/gpu_check.sh, or python -m one_step_off.gpu_check.

Read `table.py` first: it lists the checks. `runner.Runner` runs each in a process of its own, and
`report.py` writes gpu_report.md.
"""
