"""Cost models in place of child processes: they answer the roles' calls in virtual time.

A model has the jobs and replies of the service that it replaces by name, reads and writes the
peer's simulated disk, and charges virtual time by its `Hardware`. Submissions are small real files
with real hashes; lengths and rewards follow from their seeds.

For other rooms, by the names in docs/rooms.md: `children`, `outer`, `rollouts`, `setting`
"""
