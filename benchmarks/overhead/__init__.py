"""What a step costs the driver, apart from the work of replicas and trainers.

`stand_ins` answers instead of replicas and ranks after fixed times, `pipeline` builds the real
pipeline on them, `measure` runs it, `report` has table and plot, `__main__` the command line.
`ray_transport` measures what Ray itself costs (`python -m benchmarks.overhead_ray`).
"""
