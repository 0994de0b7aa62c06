"""`python -m queen_pg`: the same as the command `queen-pg`."""

from queen_pg.cli import main

if __name__ == "__main__":
    main()
