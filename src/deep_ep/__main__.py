"""`python -m deep_ep`: the same as the script `deep-ep`."""

import sys

from .tools.cli import main

# The guard is needed: every rank that `run_ranks` starts imports this module again, under another name.
if __name__ == "__main__":
    sys.exit(main())
