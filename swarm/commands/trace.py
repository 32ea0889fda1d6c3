"""`swarm trace`: one submission's way through the swarm, hop by hop."""

from pathlib import Path

from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson, explained


@exits
@explained(__file__)
def trace(submission: str, logs: Path, otlp: Path | None = None, as_json: AsJson = False) -> None:
    """Show when a submission was generated, delivered, checked, fetched and trained on."""
    import dataclasses
    import json

    from swarm.look.trace import as_otlp, read_events, trace_lines, trace_of
    from swarm.terminal.output import check_writable, print_json, write_text

    if otlp is not None:
        check_writable("--otlp", otlp, (".json", ".jsonl"))
    whole, spans = trace_of(read_events(logs), submission)
    if otlp is not None:
        write_text("--otlp", json.dumps(as_otlp(whole, spans)) + "\n", otlp)
    if as_json:
        print_json({"submission": whole, "spans": [dataclasses.asdict(span) for span in spans]})
    else:
        print(numbered("\n".join(trace_lines(whole, spans))))
