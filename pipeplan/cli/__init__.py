"""The command line: one thin command each."""


def main() -> None:
    """Run the ``pipeplan`` command."""
    raise SystemExit(2)
