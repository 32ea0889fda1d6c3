"""How is the run: what terminal, page, metrics and alarms show, from signed messages and logs.

| Part | What it does |
|---|---|
| `onlooker.py` | ask a run's trusted peers for its status and for one worker's record |
| `archives.py` | logs and proofs |
| `newest_policy.py`, `networks.py` | a run's policy, a network's runs |
| `why.py`, `trace.py`, `refusals.py`, `prefixes.py` | what happened, and why |
| `dashboard/`, `metrics/`, `alarms/`, `health.py` | the page, Prometheus, alarms, health checks |
| `doctor.py` | what would keep a peer from working |
| `rollouts/` | rollouts as text, pages and tables |

For other rooms, by the names in docs/rooms.md: `alarms.raising`, `archives`, `dashboard.server`,
`dashboard.watch`, `doctor`, `health`, `metrics.server`, `networks`, `newest_policy`, `onlooker`,
`prefixes`, `rollouts`, `rollouts.export`, `rollouts.filters`, `rollouts.screen`, `rollouts.seen`,
`rollouts.sources`, `rollouts.text`, `trace`, `why`
"""
