"""vLLM as an engine, in an environment of its own (`swarm engine install`)."""
