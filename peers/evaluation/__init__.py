"""Measuring a checkpoint on tasks that no training draws, apart from any run.

For other rooms:

- `accuracy`: evaluate, mean_reward
- `command`: ProgressLine
- `during`: Evaluations
- `run`: Evaluation, Given, Machine, Measured, measure, wanted_of
- `samples`: Named
- `settings`: EvaluationSettings
- `tasks`: different_tasks
"""
