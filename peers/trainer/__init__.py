"""The trainer: opens steps, collects accepted rollouts, learns from them, publishes policies.

`role.py` tells the story, in the network process, which imports no torch. `collector.py` fills the
pool (`accepted.py`, `pool.py`), `orders.py` opens steps, `training.py` takes them one after the
other (`batches.py` waits for what they train on), `publishing.py` announces policies. `saving.py`
writes training states; `beginning.py` and `resuming.py` continue from them. The child process is
`service.py`; its learning code is in `peers/learning` (start with `step.py`).

For other rooms, by the names in docs/rooms.md: `follower`, `precedence`, `privileged`,
`state_values`
"""
