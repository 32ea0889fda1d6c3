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

For other rooms: `alarms.raising`: raising; `archives`: fetch_archive, find_archive, home_rows,
kept_proof, learn_versions, leave_out_unsound, write_export; `dashboard.server`: Dashboard, serve;
`dashboard.watch`: Feed, Watcher, watch; `doctor`: look; `health`: beating, examine;
`metrics.server`: MetricsServer; `networks`: Listed, runs_of; `newest_policy`: from_peers;
`onlooker`: RunStatus, STATUS_SECONDS_MAX, ask_all, learn_expulsions, status_of; `prefixes`:
PREFIX_MIN, peers_beside; `rollouts`: export; `rollouts.export`: COLUMNS, ROLLOUTS, Table,
check_target, write_card, write_parquet; `rollouts.filters`: Filters, Range, parse_range;
`rollouts.screen`: LEGEND, lines; `rollouts.seen`: SeenRollout, Turn, as_row; `rollouts.sources`:
Source, open_source; `rollouts.text`: Decoder; `trace`: as_otlp, read_events, trace_lines, trace_of;
`why`: *, about_peer, evidence_against, peer_lines, peer_named
"""
