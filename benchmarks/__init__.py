"""Benchmarks of one_step_off: one folder (or one file) per question, each run by `python -m
benchmarks.NAME`.

A folder holds the arms that are compared, the report, and `__main__`, the command line. They share
`common` and import nothing from one another. `lora` and `overhead_ray` are commands
whose code is in the folder of a larger question.
"""
