"""Measuring a checkpoint on tasks that no training draws, apart from any run.

For other rooms: `command`: progress_shown; `during`: Evaluations; `run`: Evaluation, Machine,
Measured, accuracies, measure, wanted_of; `settings`: EvaluationSettings; `tasks`: tasks_of
"""
