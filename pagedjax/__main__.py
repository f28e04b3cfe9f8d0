"""`python -m pagedjax` is the same as `pagedjax`."""

from pagedjax.serving.cli import main

if __name__ == "__main__":
    main()
