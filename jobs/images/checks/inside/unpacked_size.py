"""Bytes of a package's wheel once unpacked, by the wheel's own record. Takes the package's name."""

import json
import sys
from importlib.metadata import distribution

if __name__ == "__main__":
    print(sum(file.size or 0 for file in distribution(json.loads(sys.argv[1])).files or ()))
