"""Cost models in place of child processes: they answer the roles' calls in virtual time.

A model has the jobs and replies of the service that it replaces by name, reads and writes the
peer's simulated disk, and charges virtual time by its `Hardware`. Submissions are small real files
with real hashes; lengths and rewards follow from their seeds.

For other rooms: `children`: SimulatedCompute; `outer`: STATE_SHARE; `rollouts`: SimulatedRollouts,
true_rewards, ungradable_groups; `setting`: Fabricates, Hardware, PROBE_HASH, Setting, TOKENIZER,
TOKENIZER_HASH, WEIGHTS, Workload
"""
