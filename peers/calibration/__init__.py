"""Calibration: how much honest engines differ, and thresholds from that. Imports torch.

work.py       a submission's work, what a worker hands in, and what a validator finds
calibrate.py  every pair of engine classes, row by row, and thresholds from honest samples
of_run.py     what `swarm run create` and `update` do about a run's thresholds

For other rooms, by the names in docs/rooms.md: `calibrate`, `of_run`, `work`
"""
