"""Calibration: how much honest engines differ, what cheats look like, and thresholds between.

    workload.py   prompts and rewards of a submission
    workers.py    honest workers and cheats
    weights.py    changed copies of a model's weights
    measure.py    let a worker generate and a validator recompute
    thresholds.py propose thresholds from honest samples; what they make of a worker
    freedom.py    how much choice the thresholds leave a worker, in bits
    calibrate.py  the whole comparison, for `swarm proofs calibrate`
    plot.py       the ROC curves

Imports torch.
"""
