"""Calibration: how much honest engines differ, what cheats look like, and thresholds between.

    workload.py   prompts and rewards of a submission
    workers.py    honest workers and cheats
    weights.py    changed copies of a model's weights
    measure.py    let a worker generate and a validator recompute
    kept.py       what was measured, on disk
    thresholds.py propose thresholds from honest samples; what they make of a worker
    freedom.py    how much choice the thresholds leave a worker, in bits
    calibrate.py  every pair of engine classes, and every cheat
    report.py     the same for `swarm run create` and `swarm proofs calibrate`, row by row
    plot.py       the ROC curves

Imports torch.
"""
