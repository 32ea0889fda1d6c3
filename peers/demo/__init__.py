"""`swarm demo`: a whole swarm on this machine, as separate processes on loopback.

`play` prepares the run and its peers (`cast`), and watches their processes; `state` collects their
events; `view` and `plain` show it.

For other rooms: `recipes`: ENVIRONMENT, OBJECTIVE, OF_MODEL, OPTIMISER, RECIPES, Recipe, SAMPLING,
SCHEDULE, THRESHOLDS, Warmup, recipe_of; `setup`: Setting, free_ports, write_config; `warmup`:
prepare_base, warm_up
"""
