"""What older samples gain in speed and cost in learning: pipeline.staleness and
weight_sync.in_flight.

`arms` names the runs and takes their figures, `report` has the table and the plot, `__main__` the
command line.
"""
