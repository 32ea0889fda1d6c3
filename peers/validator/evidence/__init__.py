"""Evidence that a worker did not do what the run asks: one anytime-valid test per worker.

    selection.py   bets that tolerated mismatches do not depend on reward, ending or length
    submission.py  the evidence of one recomputed submission: bets on bounded scores

`swarm.ledger.evidence` has a worker's evidence over all verdicts.

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
