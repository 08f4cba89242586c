"""What the benchmarks share: the command line, processes and whole runs, models and batches, and
parts of reports.

Read `runs.run_arm` first: most benchmarks compare whole runs of the program that differ in a few
config keys.
"""
