"""``python -m kvkernels`` is ``kvk``."""

from kvkernels.cli import main

if __name__ == "__main__":
    main()
