"""`swarm synthesize`: solutions of a teacher, selected and written as a data set."""
