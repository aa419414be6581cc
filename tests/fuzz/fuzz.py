"""Coverage-guided fuzzing of everything that reads strangers' files. Needs atheris (pip install atheris), Linux.

    python -m zipfile -e tests/fuzz/corpus.zip /tmp/seeds; mkdir /tmp/found
    PYTHONPATH=tests:tests/fuzz python tests/fuzz/fuzz.py /tmp/found /tmp/seeds -max_total_time=1800 -timeout=30

New inputs go to the first folder; minimise.py makes a new corpus.zip of it.
"""

from __future__ import annotations

import resource
import sys

import atheris  # type: ignore[import-not-found, unused-ignore]

with atheris.instrument_imports(include=["vkbackend", "jinja2"]):
    import jinja2.sandbox  # noqa: F401 (imported here, so that it is guided by its coverage as well)
    import targets

MEMORY_BYTES = 4 << 30  # an input that asks for more fails with MemoryError, which is a finding


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    atheris.Setup(sys.argv, targets.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
