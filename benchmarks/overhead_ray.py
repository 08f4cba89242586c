"""The command `python -m benchmarks.overhead_ray`; the benchmark is
benchmarks/overhead/ray_transport.py.
"""

from benchmarks.overhead.ray_transport import main

if __name__ == "__main__":
    main()
