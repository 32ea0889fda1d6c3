"""Environment peers: they hold the episodes of a run's served environments and sign their turns."""
