"""A standby: copies of a trainer's state on another machine, and how it takes the trainer's place.

`bundle` is the encrypted form of a state, `offering` the trainer's side, `following` the standby's.
"""
