"""`python -m triblade` is the `triblade` command."""

import sys

from triblade.cli import main

sys.exit(main())
