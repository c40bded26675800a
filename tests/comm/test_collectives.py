#!/usr/bin/env python3
"""Every collective over 2, 3 and 4 ranks: test_collectives.py SIZE [cuda]. Exits with 77 (skipped) without MPI or
where there are fewer GPUs than ranks."""
import sys

from ranks import Run, skip_without_mpi

skip_without_mpi()
run = Run(sys.argv[1], "collectives", *sys.argv[2:])
code = run.finish()
print("\n".join(run.lines))
sys.exit(code)
