"""`python -m enginehouse_cli`: the command line by the interpreter it is installed in."""

from __future__ import annotations

from enginehouse_cli.main import main

if __name__ == "__main__":
    main()
