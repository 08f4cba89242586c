"""The command `python -m benchmarks.sync_model`; the cost model is
benchmarks/weight_sync/cost_model.py.
"""

from benchmarks.weight_sync.cost_model import main

if __name__ == "__main__":
    main()
