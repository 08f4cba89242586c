"""The planner of GPU splits: the real pipeline in simulated time, and the command that compares splits."""
