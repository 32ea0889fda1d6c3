"""`swarm dataset`: the tasks of a data set that a policy solves sometimes, and its attempts.

For other rooms: `similar`: Texts, shingles, similarity
"""
