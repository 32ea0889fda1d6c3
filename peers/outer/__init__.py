"""The replica role: one of several trainers of a run, which merge their work once per round.

Each trainer takes inner steps from the common outer state and publishes its pseudo-gradient. One of
them signs which contributions a round has (`chain`, `gathering`), and every trainer merges these to
the same bits.

For other rooms: `alone.averaging`: open_backend; `learning`: contribution, state;
`learning.contribution`: Contribution, write_values; `learning.corpus`: TextBlocks;
`learning.replica`: Replica; `learning.scoring`: score; `learning.state`: Given, OuterOptimiser,
StateFile, shares; `rating`: assignment, rate, weight; `settings`: ReplicaSettings
"""
