"""`python -m sagellm.patching`."""

import sys

from sagellm.patching.cli import main

sys.exit(main())
