"""How is the run: what terminal, page, metrics and alarms show, from signed messages and logs.

| Part | What it does |
|---|---|
| `onlooker.py` | ask a run's trusted peers for its status and for one worker's record |
| `archives.py`, `kept_proofs.py` | logs and proofs |
| `newest_policy.py`, `networks.py` | a run's policy, a network's runs |
| `why.py`, `why_step.py`, `trace.py`, `refusals.py`, `prefixes.py` | what happened, and why |
| `dashboard/`, `metrics/`, `alarms/`, `health.py` | the page, Prometheus, alarms, health checks |
| `doctor/` | what would keep a peer from working |
| `rollouts/` | rollouts as text, pages and tables |
"""
