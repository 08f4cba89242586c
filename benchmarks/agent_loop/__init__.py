"""What the agent loop itself costs.

`stand_in_engine` measures with an engine of fixed speed, `vllm_workloads` with vLLM, `report` has
the tables, `__main__` the command line.
"""
