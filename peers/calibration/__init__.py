"""Calibration: how much honest engines differ, and thresholds from that. Imports torch.

work.py       a submission's work, what a worker hands in, and what a validator finds
thresholds.py propose thresholds from honest samples
calibrate.py  every pair of engine classes, row by row
of_run.py     what `swarm run create` and `update` do about a run's thresholds

For other rooms:

- `calibrate`: EngineClass, PROPOSED, measure_run
- `of_run`: Measuring, settle
- `thresholds`: propose
- `work`: HandedIn, find
"""
