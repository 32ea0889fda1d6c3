"""`swarm synthesize`: a data set of a teacher's solutions."""
