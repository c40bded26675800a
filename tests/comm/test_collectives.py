#!/usr/bin/env python3
"""Every collective over 2, 3 and 4 ranks: test_collectives.py SIZE [cuda]. RANKS_STARTER says who starts
them (tests/support/starters.py). Exits with 77 (skipped) where there are fewer GPUs than ranks, or no mpirun."""
import sys

from ranks import Run, starters

starters.skip_without_starter()
run = Run(sys.argv[1], "collectives", *sys.argv[2:])
code = run.finish()
print("\n".join(run.lines))
sys.exit(code)
