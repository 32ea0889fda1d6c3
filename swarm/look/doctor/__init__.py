"""What would keep a peer from working on this machine: `swarm doctor`."""
