"""Evidence that a worker did not do what the run asks: one anytime-valid test per worker.

    betting.py     bets on bounded scores: what a recomputation adds to the evidence
    selection.py   bets that tolerated mismatches do not depend on reward, ending or length
    submission.py  the evidence of one recomputed submission, as its verdict carries it
    worker.py      a worker's evidence over all verdicts, and the bound on false evictions

Four processes bet against an honest worker, each on one kind of lie:

    sampler    tokens deviate from the recomputed sample more than rounding explains: another
               temperature or top-p, another seed, rounded weights
    policy     activations deviate more than rounding explains: other weights
    text       tokens that no rounding explains: a text that was not sampled at all
    selection  near ties fall to one side more often in rollouts with more (or less) reward,
               with a stop, or of some length: a worker who chooses among tolerated tokens

All functions are pure and need neither torch nor the policy, so anyone who has the verdicts can
recompute a worker's evidence.
"""
