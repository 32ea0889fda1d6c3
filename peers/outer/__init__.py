"""The replica role: one of several trainers of a run, which merge their work once per round.

Each trainer takes inner steps from the common outer state and publishes its pseudo-gradient. One of
them signs which contributions a round has (`chain`, `gathering`), and every trainer merges these to
the same bits.

For other rooms, by the names in docs/rooms.md: `alone.averaging`, `learning`,
`learning.contribution`, `learning.corpus`, `learning.replica`, `learning.scoring`,
`learning.state`, `rating`, `settings`
"""
