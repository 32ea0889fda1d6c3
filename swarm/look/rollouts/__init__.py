"""Rollouts in a form for people: on the terminal, as a page, and as a data set."""
