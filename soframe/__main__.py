"""`python -m soframe` is the `soframe` command."""

from soframe.cli import main

if __name__ == "__main__":
    main()
