"""The checks of a submission: one file per check, in one folder for each kind of evidence.

    announcement/  what was announced, beside the step order and the run; network process
    judging/       what may have changed since the announcement; network process
    file/          the file, beside what its seed gives; inspector, without torch
    history/       the worker's and the run's other submissions; network process
    policy/        activations and sampling, recomputed with the weights; prefill process

A submission passes through the folders in this order, and through each folder's list `CHECKS` in
its order, cheapest first, up to the first check that fails. To add a check, write its file and name
it in the list of its folder.
"""
