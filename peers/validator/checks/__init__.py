"""The checks of a submission: one file for each kind of evidence.

    announcement  the announcement against the step order and the run; network process
    standing      conditions that may change after the announcement; network process
    file          the file against the content its seed determines; inspector, without torch
    history       the worker's and the run's other submissions; network process
    policy        activations and sampling, recomputed with the weights; prefill process

A submission passes through the files in this order. Each file lists its checks, cheapest first; the
first check that fails ends the examination. To add a check, write its class and add it to the list
of its file.
"""
