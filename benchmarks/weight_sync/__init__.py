"""Ways to bring a trainer's weights into vLLM, against a raw broadcast of the same bytes.

`arms` has the ways as the driver sees them; `trainer`, `replica` and `engine` are their parts in
the other processes; `measure` runs them, `report` has table and plot, `__main__` the command line.
`exposed` measures what a sync adds to a step, `lora` compares two ways for adapters (`python -m
benchmarks.lora`).
"""
