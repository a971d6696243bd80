"""`python -m abyssal`, the same as the command `abyssal`."""

import sys

from .cli.main import main

sys.exit(main())
