"""Formats and colours of figures, roles and states on the screen."""

DIM = "bright_black"
ROLE_STYLES = {
    "bootstrap": "blue",
    "relay": "blue",
    "trainer": "magenta",
    "validator": "yellow",
    "inference": "cyan",
}
STATE_STYLES = {
    "live": "green",
    "finished": "green",
    "starting": DIM,
    "joining": "yellow",
    "suspected": "yellow",
    "restarting": "bold yellow",
    "gone": "red",
    "left": DIM,
    "evicted": "bold red",
}


def readable_bytes(count: int) -> str:
    """Format bytes in powers of ten, in at most six characters: `843 B`, `1.2 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"


def readable_seconds(seconds: float) -> str:
    """Format a duration: `48 s`, `3:07`, `2:14:09`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def figure(value: float) -> str:
    """Format a check's figure with three digits: `0.034`, `12`, `1.2e-10`."""
    return f"{value:.3g}"
