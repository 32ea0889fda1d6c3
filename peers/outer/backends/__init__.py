"""Libraries that average pseudo-gradients, each in a process and an environment of its own.

They trust every member of their network, unlike Swarm's own outer loop.
"""
