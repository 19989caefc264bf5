"""``python -m pipeplan`` is the ``pipeplan`` command."""

from .cli import main

if __name__ == "__main__":
    main()
