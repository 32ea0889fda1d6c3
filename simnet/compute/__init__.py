"""Cost models in place of child processes: they answer the roles' calls in virtual time.

A model replaces a service by its name, with the same jobs and replies. It reads and writes the
peer's simulated disk, charges virtual time by the peer's `Hardware`, and answers like the real
service. Submissions are small real files with real hashes, so that the roles exchange them as on a
real network. Lengths and rewards follow from the submission's seed, so that every reader of a file
finds the same.

For other rooms: `children`: SimulatedCompute; `outer`: STATE_SHARE; `rollouts`: SimulatedRollouts,
true_rewards, ungradable_groups; `setting`: Fabricates, Hardware, PROBE_HASH, Setting, TOKENIZER,
TOKENIZER_HASH, WEIGHTS, Workload
"""
