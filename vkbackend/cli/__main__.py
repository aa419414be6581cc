"""`python -m vkbackend.cli`."""

import sys

from vkbackend.cli import main

if __name__ == "__main__":
    sys.exit(main())
