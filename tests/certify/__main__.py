"""``python -m tests.certify``: ``certify`` with the project's own flags, from a checkout.

python -m tests.certify --loop --pp 2 --tp 2 --batches 20
python -m tests.certify --trees --pp 2
"""

import sys

from tests.certify.backend import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"tests.certify: error: {error}", file=sys.stderr)
        sys.exit(2)
