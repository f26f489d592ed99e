"""One file per question, the peers beside us in the same run; `python -m benchmarks` asks them all."""
