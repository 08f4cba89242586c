"""The command `python -m benchmarks.lora`; the benchmark is benchmarks/weight_sync/lora.py."""

from benchmarks.weight_sync.lora import main

if __name__ == "__main__":
    main()
