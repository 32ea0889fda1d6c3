"""What a run's owner does: `swarm run` makes, signs and changes manifests, and makes invites."""
