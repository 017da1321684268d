"""`python -m expertd_echo`."""

import sys

from expertd_echo.command import main

sys.exit(main())
