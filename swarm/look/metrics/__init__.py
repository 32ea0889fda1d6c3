"""A peer's figures for Prometheus: made from its events (`figures`), served on HTTP (`server`)."""
