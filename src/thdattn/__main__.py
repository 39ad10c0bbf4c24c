"""`python -m thdattn`."""

import sys

from thdattn.cli import main

sys.exit(main())
