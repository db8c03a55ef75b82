"""Run the command line as `python -m minikv`."""

from .cli import main

raise SystemExit(main())
