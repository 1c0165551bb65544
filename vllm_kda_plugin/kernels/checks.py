"""What a refused argument is told."""


def refused(name: str, found: str, allowed: str) -> ValueError:
    """The error for an argument: its name, what was found, what is allowed."""
    return ValueError(f"{name} {found}, must be {allowed}")
