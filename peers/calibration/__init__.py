"""Calibration: how much honest engines differ, and thresholds from that. Imports torch.

workload.py   prompts and rewards of a submission
workers.py    a worker
measure.py    what a validator finds of a submission
thresholds.py propose thresholds from honest samples
calibrate.py  every pair of engine classes, row by row
of_run.py     what `swarm run create` and `update` do about a run's thresholds
"""
