"""The planner: which split of N GPUs is fastest, by a simulation of the pipeline in simulated time.

`planner.py` is the command; read `work.py` first, the model of a step, then `simulation.py`.
"""
