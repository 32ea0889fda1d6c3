"""The trusted peers' append-only logs, and the credits and evictions computed from them."""
